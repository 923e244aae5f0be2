"""OptimizerStep: what `forward_backward` has added up since the last `optim_step`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slime_core.contracts.backend import ObjectiveOutput
from slime_fsdp.optimizer import GradientSums


@dataclass(slots=True, kw_only=True, eq=False)
class OptimizerStep:
    parameters: Sequence[nn.Parameter]
    """The trained ones."""
    gradients: GradientSums
    loss: Tensor
    """Scalar, on the rank's device."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Scalars, on the rank's device."""
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def begun(cls, parameters: Sequence[nn.Parameter], device: torch.device) -> OptimizerStep:
        return cls(parameters=parameters, gradients=GradientSums(parameters), loss=torch.zeros((), device=device))

    def add(self, result: ObjectiveOutput) -> None:
        """Adds what a micro-batch reports."""
        self.loss += result.loss
        for name, value in result.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
