"""Adapter and Snapshot: handles of a session's adapters, with calls that block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.controller.learner import LearnerBatch
    from slime_core.types.batch import Float32, TokenColumns
    from slime_core.types.sample import SampleGroup
    from slime_core.workers.recorded_objective import Gradients
    from slime_session.adapter_loop import AdapterLoop, AdapterState
    from slime_session.engine_adapters import HeldSnapshot
    from slime_session.live_run import LiveRun
    from slime_session.loss_choice import Loss
    from slime_session.reports import OptimizerStepReport
    from slime_training.adapters.folder import AdapterCopy


class Adapter:
    """Made by `TrainingSession.add_adapter` or `load_adapter`. What it computes does not depend on the session's other
    adapters, to the bit. After an error inside `forward_backward` or `optim_step` its state is unknown: only `remove` may
    follow."""

    def __init__(self, live: LiveRun, loop: AdapterLoop, state: AdapterState) -> None:
        self._live = live
        self._loop = loop
        self._state = state

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def rank(self) -> int:
        return self._state.rank

    @property
    def step(self) -> int:
        """Optimizer steps that it has taken, over all sessions."""
        return self._state.step

    def forward(self, batch: LearnerBatch) -> Float32:
        """As the session's, under this adapter's weights."""
        return self._live.do(lambda: self._loop.forward(self._state, batch))

    def credit(self, groups: Sequence[SampleGroup], columns: TokenColumns | None = None) -> LearnerBatch:
        """As the session's, with old log-probs under this adapter's weights; those of the reference are the base's."""
        return self._live.do(lambda: self._loop.credit(self._state, groups, columns))

    def forward_backward(self, batch: LearnerBatch, *, step: int | None = None, loss: Loss | None = None) -> Gradients:
        """As the session's: adds the gradients of this adapter to those since its last `optim_step`."""
        return self._live.do(lambda: self._loop.forward_backward(self._state, batch, step, loss))

    def optim_step(
        self,
        lr: float | None = None,
        *,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        grad_clip: float | None = None,
    ) -> OptimizerStepReport:
        """Clips this adapter's gradients and takes an optimizer step, with these settings in it alone; None: the run's
        (`train`). grad_clip: global norm that gradients are cut to; 0: never. The report's `step` counts this adapter's. Raises
        TrainingError without gradients, and NonfiniteWeights."""
        from slime_session.step_settings import step_settings

        settings = step_settings(
            self._loop.session.run, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, grad_clip=grad_clip
        )
        return self._live.do(lambda: self._loop.optim_step(self._state, settings))

    def snapshot(self) -> Snapshot:
        """Its weights now, in every engine, for `sample` and `generate` while training continues. It is held until
        `Snapshot.drop`. Raises ConfigError if the engines hold `engine.max_adapters` already."""
        held = self._live.do(lambda: self._loop.snapshot(self._state))
        return Snapshot(self._live, self._loop, held)

    def save(self, folder: str | Path, *, optimizer: bool = True) -> Path:
        """Writes a folder in peft's format, with `optimizer` its optimizer state and step count too, and returns it. It is
        complete or absent; an earlier one of this name is replaced. Gradients are not saved. Raises StorageError."""
        return self._live.do(lambda: self._loop.save(self._state, Path(folder).absolute(), optimizer))

    def copy(self, *, optimizer: bool = True) -> AdapterCopy:
        """What `save` would write now, in host memory. Its `write(folder)` writes it in the thread that calls it, while this
        session serves other calls."""
        return self._live.do(lambda: self._loop.copy(self._state, optimizer))

    def remove(self) -> None:
        """Frees its memory; snapshots stay. A second call does nothing."""
        self._live.do(lambda: self._loop.remove(self._state))


class Snapshot:
    """Weights of an adapter that the engines hold. Made by `Adapter.snapshot` and `TrainingSession.load_snapshot`."""

    def __init__(self, live: LiveRun, loop: AdapterLoop, held: HeldSnapshot) -> None:
        self._live = live
        self._loop = loop
        self.held = held
        """For the session."""

    @property
    def name(self) -> str:
        return self.held.name

    def drop(self) -> None:
        """Frees its memory; requests that run with it end as aborted. A second call does nothing."""
        self._live.do(lambda: self._loop.drop(self.held))
