"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): torch's, over whole matrices or their shards.

The momentum is kept in shards. The update needs whole matrices: each rank gets some of them in bfloat16, the dtype in which
torch iterates too, and gives each rank its rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr, _zeropower_via_newtonschulz

from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.errors import ConfigError
from slime_optimizers.config import MuonConfig
from slime_optimizers.whole_matrices import map_whole
from slime_training.adam import adam_state
from slime_training.rounded_adamw import local

COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)


class Muon(torch.optim.Optimizer):
    """Steps on the groups with `hidden`, whose parameters are matrices, as torch.optim.Muon; on the others as torch's fused
    AdamW, which shares groups and state with it."""

    def __init__(self, groups: Sequence[dict[str, Any]], config: OptimizerConfig, options: MuonConfig) -> None:
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay, "hidden": False})
        self._options = options
        if not any(group["hidden"] for group in self.param_groups):
            raise ConfigError(
                f'train.optimizer = "{config.optimizer}": it steps on matrices of a model\'s layers, and none is trained, or '
                "the backend does not mark them. Train some, or set optimizer adam."
            )
        others = [group for group in self.param_groups if not group["hidden"]]
        betas = (config.adam_beta1, config.adam_beta2)
        # torch refuses an optimizer without parameters.
        first = others or [{"params": [torch.zeros(0)]}]
        self._adamw = torch.optim.AdamW(first, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
        self._share()

    def _share(self) -> None:
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if not group["hidden"]]
        self._matrices = {id(matrix) for group in self.param_groups if group["hidden"] for matrix in group["params"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # After load_state_dict, groups and state are new objects.
        super().__setstate__(state)
        self._share()

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns `momentum_buffer` of a matrix, `step` and the moments of another parameter; creates them if no step has done
        so."""
        if id(parameter) not in self._matrices:
            return adam_state(self, parameter)
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if group["hidden"]:
                for matrices in batches(group["params"]):
                    self._step_on(matrices, group["lr"], group["weight_decay"])
        self._adamw.step()
        return loss

    def _step_on(self, matrices: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        """One matrix, or sharded ones, at most as many as ranks."""
        shapes = [matrix.shape for matrix in matrices]
        updates = [self._momentum(matrix) for matrix in matrices]
        if isinstance(matrices[0], DTensor):
            updates = map_whole(self._orthogonal, shapes, updates, matrices[0].device_mesh)
        else:
            updates = [self._orthogonal(update) for update in updates]
        for matrix, shape, update in zip(matrices, shapes, updates, strict=True):
            weight = local(matrix)
            weight.mul_(1 - lr * weight_decay)
            weight.add_(update, alpha=-_adjust_lr(lr, self._options.muon_scale, shape))

    def _momentum(self, matrix: Tensor) -> Tensor:
        """Takes the gradient into the momentum, and returns this rank's rows of the update, bfloat16."""
        assert matrix.grad is not None
        momentum, gradient = self._options.muon_momentum, local(matrix.grad)
        mean = local(self.state_of(matrix)["momentum_buffer"])
        mean.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(mean, momentum) if self._options.muon_nesterov else mean
        return update.to(torch.bfloat16)

    def _orthogonal(self, update: Tensor) -> Tensor:
        """(R, C) bfloat16, which is overwritten."""
        return _zeropower_via_newtonschulz(update, COEFFICIENTS, self._options.muon_steps, EPS)


def batches(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters that have a gradient, in lists of one; sharded ones in lists of as many as ranks, which then have about the
    same work."""
    several = [parameter for parameter in parameters if parameter.grad is not None]
    if several and isinstance(several[0], DTensor):
        several.sort(key=lambda parameter: tuple(parameter.shape))
        size = several[0].device_mesh.size()
    else:
        size = 1
    for start in range(0, len(several), size):
        yield several[start : start + size]
