"""Batch-invariant matrix products on a CPU, instead of SGLang's batch-invariant mode, which requires Triton."""

from __future__ import annotations

import torch

from slime_training.batch_invariant.products import add_product, multiply


def use_row_blocks() -> torch.library.Library:
    """Replaces all matrix products in this process, as long as the returned object lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", multiply, "CPU")
    library.impl("addmm", add_product, "CPU")
    return library
