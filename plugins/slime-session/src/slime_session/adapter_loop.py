"""AdapterLoop: what a loop of one's own does with adapters, as coroutines in the run's event loop, one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slime_core import groups as entry_groups
from slime_core.config.bound import BoundRun
from slime_core.contracts.optimizer import StepSettings
from slime_core.controller.learner import LearnerBatch
from slime_core.controller.role_task import RoleTask
from slime_core.controller.session import Session
from slime_core.errors import ConfigError, TrainingError
from slime_core.types.batch import Float32, TokenColumns
from slime_core.types.sample import SampleGroup
from slime_core.types.weights import Bucket
from slime_core.workers.buckets import make_bucket
from slime_core.workers.recorded_objective import Gradients
from slime_session.engine_adapters import EngineAdapters, HeldSnapshot
from slime_session.loss_choice import Loss, objective_of, step_of
from slime_session.named_plugins import those_with
from slime_session.own_loop import OwnLoop, learner_of, report_of
from slime_session.reports import OptimizerStepReport
from slime_session.target_batch import predicting
from slime_training.adapters.drivers import AdapterHolder
from slime_training.adapters.folder import AdapterCopy, read_adapter_folder
from slime_training.adapters.shape import AdapterShape

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class AdapterState:
    """Of an adapter that the trainers hold."""

    name: str
    rank: int
    scale: float
    step: int = 0
    accumulated: Sequence[RoleTask] = ()
    """Not empty: it has gradients that no optimizer step has taken."""
    is_lost: bool = False
    """An error or interrupt left the trainers inside one of its optimizer steps."""
    is_removed: bool = False


class AdapterLoop:
    def __init__(self, loop: OwnLoop, engines: EngineAdapters) -> None:
        self._loop = loop
        self._engines = engines
        self.held: dict[str, AdapterState] = {}

    @property
    def session(self) -> Session:
        return self._loop.session

    async def add(self, name: str, shape: AdapterShape, seed: int) -> AdapterState:
        self._require_room(name)
        await self._on_trainers("add_adapter", name, shape, seed)
        self.held[name] = AdapterState(name=name, rank=shape.rank, scale=shape.scale)
        return self.held[name]

    async def load(self, name: str, folder: Path, optimizer: bool) -> AdapterState:
        self._require_room(name)
        _, shape = read_adapter_folder(folder)
        try:
            steps = await self._on_trainers("load_adapter", name, folder, optimizer)
        except Exception:
            # Some ranks may hold it.
            await self._on_trainers("remove_adapter", name)
            raise
        self.held[name] = AdapterState(name=name, rank=shape.rank, scale=shape.scale, step=steps[0])
        return self.held[name]

    async def remove(self, adapter: AdapterState) -> None:
        if adapter.is_removed:
            return
        adapter.is_removed = True
        del self.held[adapter.name]
        await self._on_trainers("remove_adapter", adapter.name)

    async def save(self, adapter: AdapterState, folder: Path, optimizer: bool) -> Path:
        self._require(adapter)
        await self._on_trainers("save_adapter", adapter.name, folder, optimizer)
        return folder

    async def copy(self, adapter: AdapterState, optimizer: bool) -> AdapterCopy:
        self._require(adapter)
        copies = await self._on_trainers("copy_adapter", adapter.name, optimizer)
        return next(found for found in copies if isinstance(found, AdapterCopy))

    async def forward(self, adapter: AdapterState, batch: LearnerBatch) -> Float32:
        self._require(adapter)
        async with self._using(adapter):
            return await self._loop.forward(batch)

    async def credit(
        self, adapter: AdapterState, groups: Sequence[SampleGroup], columns: TokenColumns | None
    ) -> LearnerBatch:
        self._require(adapter)
        async with self._using(adapter):
            return await self._loop.credit(groups, columns)

    async def forward_backward(
        self, adapter: AdapterState, batch: LearnerBatch, step: int | None, loss: Loss | None
    ) -> Gradients:
        self._require(adapter)
        number, other = step_of(batch, step), objective_of(self.session.run, loss, batch)
        async with self._training(adapter), predicting(self.session, batch):
            gradients = await learner_of(self.session).forward_backward(batch, number, other)
        adapter.accumulated = batch.tasks
        return gradients

    async def optim_step(self, adapter: AdapterState, settings: StepSettings) -> OptimizerStepReport:
        self._require(adapter)
        if not adapter.accumulated:
            raise TrainingError(f'adapter "{adapter.name}": optim_step without gradients: call forward_backward first.')
        async with self._training(adapter):
            trained = await learner_of(self.session).optim_step(adapter.accumulated, settings)
        adapter.accumulated = ()
        report = report_of(trained, adapter.step)
        adapter.step += not report.skipped
        return report

    async def snapshot(self, adapter: AdapterState) -> HeldSnapshot:
        self._require(adapter)
        self.require_no_gradients_lost("snapshot")
        buckets = await self._on_trainers("export_adapter_of", adapter.name)
        bucket = next(found for found in buckets if isinstance(found, Bucket))
        return await self._engines.hold(adapter.name, adapter.scale, bucket)

    async def load_snapshot(self, folder: Path) -> HeldSnapshot:
        low_rank, shape = read_adapter_folder(folder)
        bucket = make_bucket(list(low_rank.tensors().items()), version=0, index=0, last=True)
        return await self._engines.hold(None, shape.scale, bucket)

    async def drop(self, held: HeldSnapshot) -> None:
        await self._engines.drop(held)

    def _require_room(self, name: str) -> None:
        session = self.session
        most = max_adapters(session.run)
        learner_of(session)
        if len(session.roles) > 1:
            raise ConfigError(
                f"add_adapter: this run trains {', '.join(session.roles)}; adapters need a recipe without a critic."
            )
        if name in self.held:
            raise ConfigError(
                f'adapter "{name}": the name is in use. Remove that adapter first, or choose another name.'
            )
        if len(self.held) >= most:
            raise ConfigError(
                f'adapter "{name}": the trainers hold {most} already. Remove one, or set a larger backend.max_adapters.'
            )

    def _require(self, adapter: AdapterState) -> None:
        if adapter.is_removed:
            raise ConfigError(f'adapter "{adapter.name}": it was removed. Add or load one.')
        if adapter.is_lost:
            raise TrainingError(
                f'adapter "{adapter.name}": an error or an interrupt left the trainers inside an optimizer step. Remove it, '
                "and load what was saved last."
            )

    async def keeping_gradients(self, call: str, work: Callable[[], Awaitable[T]]) -> T:
        """For calls after which trainers may be offloaded."""
        self.require_no_gradients_lost(call)
        return await work()

    def require_no_gradients_lost(self, call: str) -> None:
        waiting = [adapter.name for adapter in self.held.values() if adapter.accumulated]
        if waiting and self.session.colocation.offloads:
            raise TrainingError(
                f"{call} between forward_backward and optim_step of {', '.join(waiting)}: trainers and engines take turns on "
                "the same devices, and keep no gradients between. Call optim_step first, or do not set launcher.colocate."
            )

    @contextlib.asynccontextmanager
    async def _training(self, adapter: AdapterState) -> AsyncIterator[None]:
        """Around what changes its gradients or weights."""
        adapter.is_lost = True
        try:
            async with self._using(adapter), self.session.colocation.train():
                yield
        finally:
            # The base is a policy version all the time: an engine that was lost may be restarted with it.
            self.session.optimizer_idle.set()
        adapter.is_lost = False

    @contextlib.asynccontextmanager
    async def _using(self, adapter: AdapterState) -> AsyncIterator[None]:
        policy = self.session.policy
        await policy.call_all("of_backend", "use_adapter", adapter.name)
        try:
            yield
        finally:
            await policy.call_all("of_backend", "use_adapter", None)

    async def _on_trainers(self, method: str, *args: object) -> list[Any]:
        session, policy = self.session, self.session.policy
        async with session.colocation.train(), policy.turn():
            return await policy.call_all("of_backend", method, *args)


def max_adapters(run: BoundRun) -> int:
    """ConfigError if the run's backend holds no adapters."""
    backend = run.backend
    if not issubclass(backend.driver, AdapterHolder):
        raise ConfigError(
            f'add_adapter: backend "{backend.entry.name}" holds no adapters. Backends that do: '
            f"{those_with(run, entry_groups.BACKENDS, AdapterHolder)}."
        )
    most = int(backend.driver.max_adapters(backend.config))
    if not most:
        raise ConfigError(
            "add_adapter: this run trains the weights themselves. Set backend.max_adapters, the number of adapters that the "
            "trainers hold at a time over the frozen weights."
        )
    return most
