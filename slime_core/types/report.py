"""What a training step, a publish and an evaluation report back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

ComparedWith: TypeAlias = Literal["trainer", "engines"]
"""`engines`: with one another, which shows that they hold the same, and not that it is the trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimiser step on one rank.

    `sums` are dot products with the loss weights over this rank's tokens: the driver adds them over ranks, and the
    result is the metric. A rank that holds a copy of another's tokens (tensor or pipeline parallel) reports none.
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    """Global norm before clipping, the same on every rank."""
    lr: float = 0.0
    skipped: bool = False
    """The loss or the norm was not finite: no parameter was changed."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """One rollout batch trained: metrics of each optimiser step, over all ranks."""

    version: int
    steps: tuple[Mapping[str, float], ...]
    rollout: Mapping[str, float]
    """Means over the batch: rewards, advantages, lengths, log-probs."""
    perf: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """One version of the weights brought to the engines."""

    version: int
    seconds: float
    bytes_sent: int
    buckets: int
    compared_with: ComparedWith | None = None
    """What the engines' weights were compared with afterwards; None: with nothing."""
    density: float | None = None
    """Share of the elements that are others than in the version before; None: nobody compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """One evaluation over all sets. `metrics` are named as in the tracker (`eval/NAME`, `eval/NAME-pass@4`)."""

    rollout_id: int
    version: int
    metrics: Mapping[str, float]
