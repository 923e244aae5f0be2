"""Batch-invariant kernels of torch's own operations: what is computed for a token depends on its sequence alone, to the bit.

Not on what else is in the batch, how it is packed or padded, nor on whether the token is decoded or read. So an engine
and a trainer that compute with them agree exactly about the log-probs of what the engine sampled (true on-policy).

Additions, multiplications, divisions and roots are rounded the same everywhere (IEEE 754). Sums are taken in a fixed tree
of additions (`sums`), products of matrices in blocks that always have the same number of rows (`products`), and what has
transcendental functions in it is written with those that torch computes alike wherever an element stands (`kernels`).
`mode` puts them under a model, whatever it is written in; `attention` is called by name.
"""
