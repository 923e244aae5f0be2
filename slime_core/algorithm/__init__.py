"""Groups to columns, advantages, losses and micro-batches: the arithmetic of a training step."""
