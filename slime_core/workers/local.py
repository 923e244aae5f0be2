"""The launcher `local`: everything in this process. Engines share the event loop, trainer ranks share a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from slime_core.contracts.engine import EngineInfo
from slime_core.rollout.engine_slot import EngineHandle
from slime_core.workers.engine_worker import EngineWorker, EngineWorkerSpec
from slime_core.workers.launcher import Launcher, RankHandle
from slime_core.workers.train_worker import TrainWorker, TrainWorkerSpec

STOP_S: Final = 45.0
"""Seconds that a lost engine gets to end its processes."""
RANK_STOP_S: Final = 10.0
"""Seconds that a rank gets to end its call and itself."""


class LocalRank:
    """Calls run in a thread, so that the event loop keeps running (progress, Ctrl-C) while it trains."""

    def __init__(self, worker: TrainWorker, thread: ThreadPoolExecutor) -> None:
        self.worker = worker
        self._thread = thread

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        bound = getattr(self.worker, method)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: bound(*args, **kwargs))

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        items = await self.call(method, *args)
        loop, ended = asyncio.get_running_loop(), object()
        while (item := await loop.run_in_executor(self._thread, next, items, ended)) is not ended:
            yield item


class LocalLauncher(Launcher):
    """One rank for each trained role, any number of engines. All ranks work in one thread: each thread that calls torch has
    OpenMP threads of its own; as soon as there are more than cores they sleep between operations, and small ones are slow."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "trainers")
        self._ranks: list[LocalRank] = []
        self._engines: list[EngineWorker | None] = []
        """None: ended and not replaced yet."""
        self._specs: list[EngineWorkerSpec] = []
        self._prepared: dict[int, EngineWorker] = {}
        """Engines that have not started yet, by index."""

    async def start_trainers(self, specs: Sequence[TrainWorkerSpec]) -> Sequence[RankHandle]:
        before = len(self._ranks)
        for spec in specs:
            worker = await asyncio.get_running_loop().run_in_executor(self._thread, TrainWorker, spec)
            self._ranks.append(LocalRank(worker, self._thread))
        return self._ranks[before:]

    async def prepare_engines(self, specs: Sequence[EngineWorkerSpec]) -> None:
        for spec in specs:
            engine = self._prepared[spec.setup.index] = EngineWorker(spec)
            await engine.prepare_start()

    async def start_engines(self, specs: Sequence[EngineWorkerSpec]) -> tuple[Sequence[EngineHandle], list[EngineInfo]]:
        infos, started = [], []
        for spec in specs:
            engine = self._prepared.get(spec.setup.index) or EngineWorker(spec)
            infos.append(await engine.start())
            self._prepared.pop(spec.setup.index, None)
            started.append(engine)
            self._engines.append(engine)
            self._specs.append(spec)
        return started, infos

    async def end_engine(self, index: int) -> None:
        engine = self._engines[index]
        if engine is None:
            return
        # An engine that hangs is abandoned: in this process it can only be asked to stop.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(STOP_S):
                await engine.call("stop")
        self._engines[index] = None

    async def restart_engine(self, index: int) -> tuple[EngineHandle, EngineInfo]:
        await self.end_engine(index)
        engine = self._engines[index] = EngineWorker(self._specs[index])
        return engine, await engine.start()

    def share(self, value: Any) -> Any:
        return value

    async def stop(self) -> None:
        engines, self._engines = [*self._prepared.values(), *self._engines], []
        self._prepared = {}
        ranks, self._ranks = self._ranks, []
        thread, self._thread = self._thread, ThreadPoolExecutor(1, "trainers")
        # All of them, also if stopping one fails: engines first, each in the order of its start.
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(end_ranks, ranks, thread)
            for engine in reversed(engines):
                if engine is not None:
                    stack.push_async_callback(engine.call, "stop")


async def end_ranks(ranks: Sequence[LocalRank], thread: ThreadPoolExecutor) -> None:
    """The last one first. A call that hangs is left behind with the thread; if it ends after all, ranks are closed then."""
    run = partial(asyncio.get_running_loop().run_in_executor, thread)
    # The last one waits for a rank that is being made.
    ends = [*(run(rank.worker.close) for rank in reversed(ranks)), run(lambda: None)]
    thread.shutdown(wait=False)
    done, _ = await asyncio.wait(ends, timeout=RANK_STOP_S)
    for end in done:
        end.result()
