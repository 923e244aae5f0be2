"""The norm of a step's gradients, whether it can be trusted, and clipping by it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from slime_megatron.optimizer import parts_of

if TYPE_CHECKING:
    from slime_megatron.process import Ranks


def is_finite_step(optimizer: MegatronOptimizer, loss: Tensor, ranks: Ranks) -> tuple[float, bool]:
    """The global norm, and whether loss and gradients are finite on every rank. Gradients are ready to be stepped with
    afterwards."""
    found_inf = bool(optimizer.prepare_grads())
    norm = float(optimizer.get_grad_norm())
    finite = not found_inf and math.isfinite(norm)
    return norm, ranks.all_agree(loss.isfinite() & torch.tensor(finite, device=loss.device))


@torch.no_grad()
def clip(optimizer: MegatronOptimizer, norm: float) -> None:
    """Not Megatron's own, which wants CUDA tensors."""
    for part in parts_of(optimizer):
        limit = part.config.clip_grad
        name = "decoupled_grad" if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        gradients = [g for p in part.get_parameters() if (g := getattr(p, name, None)) is not None]
        if 0 < limit < norm and gradients:
            torch._foreach_mul_(gradients, limit / norm)
