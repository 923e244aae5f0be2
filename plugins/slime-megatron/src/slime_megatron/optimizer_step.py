"""OptimizerStep: what `forward_backward` has added up since the last `optim_step`, beside the gradients in their buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class OptimizerStep:
    biases: Mapping[str, Tensor]
    """Of the experts, before the step: a step that is skipped restores them."""
    began: float
    """By `time.perf_counter`."""
    found: list[tuple[Tensor, Mapping[str, Tensor]]] = field(default_factory=list)
    """Loss and metrics of each micro-batch, on the last pipeline stage."""
