"""adam: torch's fused AdamW, or AdamW with stochastic rounding where weights or moments are kept in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_core.contracts.optimizer import OptimizerConfig, RoundedState
from slime_training.rounded_adamw import STORED, StochasticRoundingAdamW, local


def make_adam(
    groups: Sequence[dict[str, Any]], config: OptimizerConfig, rounded: RoundedState | None = None
) -> torch.optim.AdamW:
    """See `OptimizerFactory`."""
    betas = (config.adam_beta1, config.adam_beta2)
    if rounded is None:
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
    return StochasticRoundingAdamW(
        groups,
        lr=config.lr,
        betas=betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        exp_avg_dtype=STORED[rounded.exp_avg],
        exp_avg_sq_dtype=STORED[rounded.exp_avg_sq],
    )


def adam_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns `step` and the moments; creates them if no step has done so."""
    if isinstance(optimizer, StochasticRoundingAdamW):
        return optimizer.state_of(parameter)
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        # The same as AdamW's first step with fused=True.
        state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state
