"""Code that the training backends of slime share: packed attention, the head in chunks, offloading, batch-invariant kernels."""
