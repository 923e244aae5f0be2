"""The norm of a step's gradients, whether they are finite, and clipping."""

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
    """Returns the global norm, and whether loss and gradients are finite on every rank. Afterwards the optimizer can step with
    the gradients."""
    fit = prepare_gradients(optimizer, loss.device, ranks)
    norm = float(optimizer.get_grad_norm())
    finite = fit and math.isfinite(norm)
    return norm, ranks.all_agree(loss.isfinite() & torch.tensor(finite, device=loss.device))


def prepare_gradients(optimizer: MegatronOptimizer, device: torch.device, ranks: Ranks) -> bool:
    """Prepares the gradients, and returns whether they are finite in float16 on every rank. Experts that are sharded over other
    ranks have an optimizer of their own, with a loss scale that would change separately; losses are multiplied by the first
    one's, and some pipeline stages have no experts. So all loss scales are updated together."""
    if not optimizer.config.fp16:
        return not optimizer.prepare_grads()
    scalers = [part.grad_scaler for part in parts_of(optimizer)]
    before = dict(vars(scalers[0]))
    fit = ranks.all_agree(torch.tensor(not optimizer.prepare_grads(), device=device))
    for scaler in scalers:
        vars(scaler).update(before)
        scaler.update(not fit)
    return fit


@torch.no_grad()
def clip(optimizer: MegatronOptimizer, norm: float) -> None:
    """Replaces Megatron's own clipping, which requires CUDA tensors."""
    for part in parts_of(optimizer):
        limit = part.config.clip_grad
        name = "decoupled_grad" if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        gradients = [g for p in part.get_parameters() if (g := getattr(p, name, None)) is not None]
        if 0 < limit < norm and gradients:
            torch._foreach_mul_(gradients, limit / norm)
