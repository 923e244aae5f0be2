"""EngineSupervisor: sees to it that lost engines come back.

It asks every engine in service how it is, on a clock of its own. An engine that fails, there or with a request, is taken
out of service and ended hard at once, started anew, brought the current weights, asked once more, and put into service
again. An engine for which that does not help ends the run.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, TypeAlias

from slime_core.config.rollout import RolloutConfig
from slime_core.contracts.engine import EngineInfo
from slime_core.contracts.hookspecs import EngineLost, EngineRecovered, EngineRestarted, Run
from slime_core.contracts.transport import EngineLink
from slime_core.errors import EngineError
from slime_core.registry.hooks import Hooks
from slime_core.rollout.client import EngineClient
from slime_core.rollout.engine_slot import EngineHandle

STANDSTILL_S: Final = 1.0
"""So much later than planned, a timer says that the loop was held, not that an engine is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRules:
    """When an engine is asked, and how much is too much."""

    interval_s: float = 30.0
    timeout_s: float = 30.0
    first_wait_s: float = 0.0
    max_restarts: int = 3
    window_s: float = 3600.0
    start_limit_s: float = 1800.0
    pause_s: float = 1.0
    """Before a second restart in a row; twice as long before each that follows."""

    @classmethod
    def of(cls, config: RolloutConfig) -> HealthRules:
        return cls(
            interval_s=config.rollout_health_check_interval,
            timeout_s=config.rollout_health_check_timeout,
            first_wait_s=config.rollout_health_check_first_wait,
            max_restarts=config.max_engine_restarts,
            window_s=config.engine_restart_window,
        )


Admit: TypeAlias = Callable[[int | None], Awaitable[None]]
"""Puts an engine into service that holds this version (None: no weights were brought) and is well; else EngineError."""

Resync: TypeAlias = Callable[[EngineLink, Admit], Awaitable[None]]
"""Brings the weights to an engine as soon as the trainers are free, and calls `Admit` before anybody publishes others.
EngineError if it is the engine that fails; any other error ends the run."""


@dataclass(eq=False, repr=False)
class EngineSupervisor:
    """A context: engines are watched inside it.

    `end`, `restart`: see `Launcher.end_engine` and `restart_engine`. The second one is called inside a `room`, which is
    waited for; `leaves` is told of the first one at once, before anybody else goes on. `rollout_id`: the step under way,
    for events. `counts`: metrics, which are added to. `first`: what the run calls the client's engine 0.
    """

    client: EngineClient
    rules: HealthRules
    _: KW_ONLY
    end: Callable[[int], Coroutine[Any, Any, None]]
    restart: Callable[[int], Awaitable[tuple[EngineHandle, EngineInfo]]]
    resync: Resync
    room: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    leaves: Callable[[asyncio.Future[None]], None] = lambda gone: None
    hooks: Hooks
    run: Run
    rollout_id: Callable[[], int]
    counts: Counter[str]
    first: int = 0

    def __post_init__(self) -> None:
        self._ends: dict[int, asyncio.Task[None]] = {}
        """Of engines that are out of service."""
        self._restarted_at: defaultdict[int, deque[float]] = defaultdict(deque)
        self._restarts: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> EngineSupervisor:
        self.client.watch(self._lose)
        for index in self.client.indices:
            self._begin(self._probe(index))
        return self

    async def __aexit__(self, *error: object) -> None:
        self.client.watch(None)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------- health

    async def _probe(self, index: int) -> None:
        """Asks the engine that is in service now, until it no longer is."""
        engine = self.client.engine(index)
        await asyncio.sleep(self.rules.first_wait_s)
        while True:
            await asyncio.sleep(self.rules.interval_s)
            if engine is None or self.client.engine(index) is not engine:
                return
            if self.client.at_rest:
                continue
            try:
                await self._ask(index, engine)
            except Exception as error:  # noqa: BLE001 - an engine that cannot say that it is well is not
                # One that was stilled meanwhile need not have answered.
                if not self.client.at_rest and self.client.engine(index) is engine:
                    self.client.quarantine(index, error)
                    return

    async def _ask(self, index: int, engine: EngineHandle) -> None:
        limit, now = self.rules.timeout_s, asyncio.get_running_loop().time
        asked_at = now()
        try:
            async with asyncio.timeout(limit):
                await engine.call("health")
        except TimeoutError as error:
            # If this process itself stood still, its clock says nothing about the engine: the answer may be there, unread.
            if now() - asked_at < limit + STANDSTILL_S:
                raise EngineError(
                    f"engine {self.first + index} has not said within {limit:g} s that it is well"
                ) from error

    # ---------------------------------------------------------------- healing

    def _lose(self, index: int, error: Exception, redispatched: int) -> None:
        self.counts["rollout/redispatched"] += redispatched
        self._end(index)
        event = EngineLost(**self._what(index), error=error, redispatched=redispatched)
        self._begin(self._heal(index, error, event))

    async def _heal(self, index: int, error: Exception, lost: EngineLost) -> None:
        now = asyncio.get_running_loop().time
        lost_at = now()
        try:
            self.hooks.emit(lost)
            tries = 0
            while True:
                self._permit(index, error)
                await asyncio.sleep(self.rules.pause_s * 2 ** (tries - 1) if tries else 0)
                tries += 1
                try:
                    version = await self._replace(index)
                    break
                except EngineError as again:
                    error = again
                    self._end(index)
            self._begin(self._probe(index))
            self.hooks.emit(EngineRecovered(**self._what(index), version=version, seconds=now() - lost_at))
        except Exception as failure:  # noqa: BLE001 - nobody waits for this task; those who wait for engines get it
            self.client.fail(failure)

    def _what(self, index: int) -> dict[str, Any]:
        """What every event says: of which run, in which step, and of which engine."""
        return {"run": self.run, "rollout_id": self.rollout_id(), "engine_index": self.first + index}

    def _permit(self, index: int, error: Exception) -> None:
        """Counts a restart; EngineError if there were too many."""
        rules, now = self.rules, asyncio.get_running_loop().time()
        times = self._restarted_at[index]
        while times and times[0] <= now - rules.window_s:
            times.popleft()
        if len(times) >= rules.max_restarts:
            raise EngineError(
                f"engine {self.first + index} was lost again after {len(times)} restarts within {rules.window_s:g} s, so it "
                f"is not started once more (--max-engine-restarts {rules.max_restarts}). The last time: {error}"
            ) from error
        times.append(now)

    async def _replace(self, index: int) -> int:
        """Another engine in place of a lost one, in service. The version that it holds; -1: none was brought."""
        number = self.first + index
        try:
            await self._ends[index]
        except Exception as error:
            raise EngineError(f"engine {number} could not be ended: {error}") from error
        await self.client.awake()
        now = asyncio.get_running_loop().time
        async with self.room():
            began = now()
            try:
                async with asyncio.timeout(self.rules.start_limit_s):
                    engine, info = await self.restart(number)
            except Exception as error:
                told = str(error) or f"not within {self.rules.start_limit_s:g} s"
                raise EngineError(f"engine {number} could not be started again: {told}") from error
        self._restarts[index] += 1
        self.counts["rollout/engine_restarts"] += 1
        self.hooks.emit(
            EngineRestarted(**self._what(index), restarts=self._restarts[index], pid=info.pid, seconds=now() - began)
        )
        link = self.client.link(engine)
        brought = -1

        async def admit(version: int | None) -> None:
            nonlocal brought
            if version is not None:
                (brought,) = await link.each("version")
                if brought != version:
                    raise EngineError(f"engine {number} was brought version {version} and has {brought}")
            await self._ask(index, engine)
            if self.client.asleep:
                await link.each("sleep")
            self.client.admit(index, engine)

        await self.resync(link, admit)
        return brought

    def _end(self, index: int) -> None:
        """Whatever of it is still there goes now: its memory may be what a trainer on the same devices waits for."""
        self._ends[index] = self._begin(self.end(self.first + index))
        self.leaves(self._ends[index])

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
