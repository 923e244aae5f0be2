"""Reports of training steps, weight updates and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

ComparedWith: TypeAlias = Literal["trainer", "engines"]
"""`trainer`: the engines' weights equal the trainer's. `engines`: they equal one another's, perhaps not the trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step on one rank, with the learning rate `lr`."""

    sums: Mapping[str, float] = field(default_factory=dict)
    """Sums of the loss and the metrics over this rank's tokens, weighted with the loss weights: the driver adds them over
    ranks to the metric. A rank with a copy of another's tokens (tensor or pipeline parallel) reports none."""
    grad_norm: float = 0.0
    """Global norm before clipping, the same on every rank."""
    lr: float = 0.0
    skipped: bool = False
    """Loss or norm was not finite: no parameter was changed."""
    split_micro_batches: int = 0
    """Micro-batches that did not fit into memory and were split, since the last report."""
    nonfinite: str | None = None
    """The first weight or optimizer state that is not finite after the step, such as "weight model.norm.weight is not finite";
    the same on every rank. It ends the run. None: all are finite."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Training on one rollout batch, over all ranks."""

    version: int
    """Policy version after it."""
    steps: tuple[Mapping[str, float], ...]
    """Metrics of each optimizer step."""
    rollout: Mapping[str, float]
    """Means over the batch: rewards, advantages, lengths, log-probs."""
    perf: Mapping[str, float]
    """Times, throughput and token counts, as `perf/...`."""
    no_signal: str | None = None
    """Why the batch taught the policy nothing, such as a gradient of 0; None: it did."""
    stuck: str | None = None
    """Why the run ends once this batch is saved: too many optimizer steps in a row were skipped. None: it continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateReport:
    """Transfer of one version of the weights to the engines."""

    version: int
    seconds: float
    bytes_sent: int
    buckets: int
    """Number of buckets, over all senders."""
    compared_with: ComparedWith | None = None
    """Weights that the engines' were compared with afterwards; None: not compared."""
    density: float | None = None
    """Share of elements that changed since the previous version, in [0, 1]; None: not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """One evaluation over all sets. `metrics` are named as in the tracker (`eval/NAME`, `eval/NAME-pass@4`)."""

    rollout_id: int
    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """What a stretch of time was spent on."""

    began: float
    """Seconds since the epoch."""
    seconds: float
    parts: Mapping[str, float]
    """Seconds by part. In a step their sum is `seconds`; at the start of a run, parts are done at the same time."""
    spans: Sequence[tuple[str, float, float]]
    """(part, start, end) in seconds from `began`. In a step there are no gaps and overlaps."""

    def metrics(self, prefix: str = "perf/") -> dict[str, float]:
        return {f"{prefix}{part}_time": seconds for part, seconds in self.parts.items()}
