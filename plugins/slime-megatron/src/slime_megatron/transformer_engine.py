"""Megatron-core 0.16 where Transformer Engine is not installed: two of its modules miss names that they use."""

from __future__ import annotations

from importlib.util import find_spec


def mend_absence() -> None:
    """Does nothing where Transformer Engine is."""
    if find_spec("transformer_engine") is not None:
        return
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # It imports Megatron's own wrappers, which are there, and takes their classes, which are None.
    multi_latent_attention.HAVE_TE = False
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
