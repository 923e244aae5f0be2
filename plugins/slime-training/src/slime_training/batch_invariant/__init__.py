"""Batch-invariant kernels for torch's operations: the result of a token depends only on its sequence, bit for bit.

Not on what else is in the batch, how it is packed or padded, nor on whether the token is decoded or read. So an engine
and a trainer that compute with them agree exactly about the log-probs of what the engine sampled (true on-policy).

Additions, multiplications, divisions and roots are rounded the same everywhere (IEEE 754). Sums are taken in a fixed tree
of additions (`sums`), products of matrices in blocks that always have the same number of rows (`products`), and
operations with transcendental functions use those that torch computes alike at every position of an element (`kernels`).
`mode` replaces the operations of a model, however it is written; `attention` is called by name.
"""
