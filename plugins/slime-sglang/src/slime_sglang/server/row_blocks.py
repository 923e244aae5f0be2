"""Matrix products on a CPU whose rows do not depend on how many there are: SGLang's batch-invariant mode, without Triton."""

from __future__ import annotations

import torch

from slime_training.batch_invariant.products import add_product, multiply


def use_row_blocks() -> torch.library.Library:
    """For all products of matrices in this process, for as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", multiply, "CPU")
    library.impl("addmm", add_product, "CPU")
    return library
