"""RecordedObjective: an objective that keeps the log-probs and the loss of every micro-batch that it is called on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class RecordedObjective:
    """An `Objective`."""

    objective: Objective
    _found: list[tuple[Tensor | None, Tensor | None, Tensor]] = field(default_factory=list)

    @property
    def reads_values(self) -> bool:
        return self.objective.reads_values

    @property
    def needs_entropy(self) -> bool:
        return self.objective.needs_entropy

    @property
    def entropy_has_gradient(self) -> bool:
        return self.objective.entropy_has_gradient

    def __call__(self, micro: MicroBatch, *, log_probs: Tensor | None = None, **given: Any) -> ObjectiveOutput:
        output = self.objective(micro, log_probs=log_probs, **given)
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
