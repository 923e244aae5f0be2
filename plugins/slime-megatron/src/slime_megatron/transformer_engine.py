"""Megatron-core 0.16 where Transformer Engine is not installed: two of its modules miss names that they use."""

from __future__ import annotations

from importlib.util import find_spec


def patch_missing_transformer_engine() -> None:
    """Sets the names that Megatron's modules miss. Does nothing if Transformer Engine is installed."""
    if find_spec("transformer_engine") is not None:
        return
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # The module imports Megatron's own wrappers, which exist, and takes their classes, which are None.
    multi_latent_attention.HAVE_TE = False
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
