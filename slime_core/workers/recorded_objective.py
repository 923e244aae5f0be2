"""RecordedObjective: an objective that keeps the log-probs and the loss of every micro-batch that it is called on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from slime_core.contracts.backend import Objective, ObjectiveOutput, Scores
from slime_core.types.batch import Float32
from slime_core.types.microbatch import MicroBatch


class Gradients(NamedTuple):
    """What a `forward_backward` computed beside gradients."""

    loss: float
    log_probs: Float32
    """(M,) nats of the response tokens, at the run's temperature; NaN where this optimizer step has no token."""


class RecordedObjective:
    """An `Objective`."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.reads_values, self.needs_entropy = objective.reads_values, objective.needs_entropy
        self.entropy_has_gradient = objective.entropy_has_gradient
        self._found: list[tuple[Tensor | None, Tensor | None, Tensor]] = []

    def __call__(self, micro: MicroBatch, *, log_probs: Tensor | None = None, **given: Any) -> ObjectiveOutput:
        output = self._objective(micro, log_probs=log_probs, **given)
        self._found.append((None if log_probs is None else log_probs.detach(), micro.rows, output.loss.detach()))
        return output

    def around(self, call: Callable[[Sequence[MicroBatch], Objective], None], micros: Sequence[MicroBatch]) -> None:
        """A call that may be repeated with other micro-batches."""
        self._found.clear()
        call(micros, self)

    def results(self) -> tuple[float, list[Scores]]:
        """Sum of the losses, and the log-probs of each micro-batch; none on a rank without the output layer."""
        scores = [
            Scores(log_probs=log_probs.cpu().numpy(), rows=None if rows is None else rows.cpu().numpy())
            for log_probs, rows, _ in self._found
            if log_probs is not None
        ]
        return sum(float(loss) for *_, loss in self._found), scores
