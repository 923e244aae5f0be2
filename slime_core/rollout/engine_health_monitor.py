"""EngineHealthMonitor: checks engines and restarts failed ones.

It calls `health` of every engine in service at an interval. An engine that fails a check or a request is killed at once, then
restarted, updated to the current weights, checked, and put into service. If it fails too often, the run ends.
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
from slime_core.contracts.transport import EngineGroup
from slime_core.errors import EngineError
from slime_core.registry.boundary import held
from slime_core.registry.hooks import Hooks
from slime_core.rollout.client import EngineClient
from slime_core.rollout.engine_slot import EngineHandle

STANDSTILL_S: Final = 1.0
"""If a timer is that late, the event loop was blocked, and the timeout does not count as the engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRules:
    """Intervals and limits of health checks and restarts. Times are in seconds."""

    interval_s: float = 30.0
    timeout_s: float = 30.0
    first_wait_s: float = 0.0
    max_restarts: int = 3
    window_s: float = 3600.0
    start_limit_s: float = 1800.0
    pause_s: float = 1.0
    """Wait before a second restart in a row, doubled for each further one."""

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
"""Checks health and version (None: it got no weights), then puts the engine into service; else raises EngineError."""

UpdateEngineWeights: TypeAlias = Callable[[EngineGroup, Admit], Awaitable[None]]
"""Sends the weights to an engine as soon as the trainers are free, and calls `Admit` before the next weight update starts.
Raises EngineError if the engine fails; any other error ends the run."""


@dataclass(eq=False, repr=False)
class EngineHealthMonitor:
    """A context manager: engines are watched inside it.

    `end`, `restart`: `Launcher.end_engine` and `restart_engine`. `restart` is called inside a `room`, once it can be entered;
    `leaves` is called at once, before other tasks continue, with a future that is done when `end` has succeeded, or raises its
    error when it was tried for the last time. `rollout_id`: the current step, for
    events. `counts`: metrics to add to. `first`: index in the run of the client's engine 0.
    """

    client: EngineClient
    rules: HealthRules
    _: KW_ONLY
    end: Callable[[int], Coroutine[Any, Any, None]]
    restart: Callable[[int], Awaitable[tuple[EngineHandle, EngineInfo]]]
    update_engine_weights: UpdateEngineWeights
    room: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    leaves: Callable[[asyncio.Future[None]], None] = lambda gone: None
    hooks: Hooks
    run: Run
    rollout_id: Callable[[], int]
    counts: Counter[str]
    first: int = 0

    def __post_init__(self) -> None:
        self._ends: dict[int, asyncio.Task[None]] = {}
        """Tasks that end engines out of service, by index."""
        self._freed: dict[int, asyncio.Future[None]] = {}
        """What `leaves` got last, by index."""
        self._given_up: set[int] = set()
        self._restarted_at: defaultdict[int, deque[float]] = defaultdict(deque)
        self._restarts: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> EngineHealthMonitor:
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
        for freed in self._freed.values():
            freed.cancel()

    # ---------------------------------------------------------------- health

    async def _probe(self, index: int) -> None:
        """Checks the engine that is in service now, until it no longer is."""
        engine = self.client.engine(index)
        await asyncio.sleep(self.rules.first_wait_s)
        while True:
            await asyncio.sleep(self.rules.interval_s)
            if engine is None or self.client.engine(index) is not engine:
                return
            if self.client.quiesce:
                continue
            with held() as unhealthy:
                await self._ask(index, engine)
            # A paused engine need not respond.
            if unhealthy.error is not None and not self.client.quiesce and self.client.engine(index) is engine:
                self.client.quarantine(index, unhealthy.error)
                return

    async def _ask(self, index: int, engine: EngineHandle) -> None:
        limit, now = self.rules.timeout_s, asyncio.get_running_loop().time
        asked_at = now()
        try:
            async with asyncio.timeout(limit):
                await engine.call("health")
        except TimeoutError as error:
            # If this process itself was blocked, the response may have arrived without being read.
            if now() - asked_at < limit + STANDSTILL_S:
                raise EngineError(
                    f"engine {self.first + index} did not respond to the health check within {limit:g} s"
                ) from error

    # ---------------------------------------------------------------- recovery

    def _lose(self, index: int, error: Exception, redispatched: int) -> None:
        self.counts["rollout/redispatched"] += redispatched
        self._end(index)
        event = EngineLost(**self._what(index), error=error, redispatched=redispatched)
        self._begin(self._recover(index, error, event))

    async def _recover(self, index: int, error: Exception, lost: EngineLost) -> None:
        now = asyncio.get_running_loop().time
        lost_at = now()
        with held() as failed:
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
        if failed.error is not None:
            # No one awaits this task.
            self._given_up.add(index)
            self._note_end(index)
            self.client.fail(failed.error)

    def _what(self, index: int) -> dict[str, Any]:
        """Fields of every event: run, step, engine."""
        return {"run": self.run, "rollout_id": self.rollout_id(), "engine_index": self.first + index}

    def _permit(self, index: int, error: Exception) -> None:
        """Counts a restart; raises EngineError if there were too many."""
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
        """Starts another engine in place of a lost one and puts it into service. Returns its version; -1: it got no weights."""
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
                message = str(error) or f"not within {self.rules.start_limit_s:g} s"
                raise EngineError(f"engine {number} could not be started again: {message}") from error
        self._restarts[index] += 1
        self.counts["rollout/engine_restarts"] += 1
        self.hooks.emit(
            EngineRestarted(**self._what(index), restarts=self._restarts[index], pid=info.pid, seconds=now() - began)
        )
        link = self.client.link(engine)
        provided = -1

        async def admit(version: int | None) -> None:
            nonlocal provided
            if version is not None:
                (provided,) = await link.call_all("version")
                if provided != version:
                    raise EngineError(f"engine {number} got weights of version {version} but has version {provided}")
            await self._ask(index, engine)
            if self.client.asleep:
                await link.call_all("sleep")
            self.client.admit(index, engine)

        await self.update_engine_weights(link, admit)
        return provided

    def _end(self, index: int) -> None:
        """Ends the engine's remaining processes at once: a trainer on the same devices may wait for their memory."""
        freed = self._freed.get(index)
        if freed is None or freed.done():
            freed = self._freed[index] = asyncio.get_running_loop().create_future()
            self.leaves(freed)
        self._ends[index] = self._begin(self.end(self.first + index))
        self._ends[index].add_done_callback(lambda _: self._note_end(index))

    def _note_end(self, index: int) -> None:
        """An end that fails is tried again: until it has succeeded, or was given up, the memory is not free."""
        end, freed = self._ends[index], self._freed[index]
        if freed.done() or not end.done() or end.cancelled():
            return
        if (error := end.exception()) is None:
            freed.set_result(None)
        elif index in self._given_up:
            freed.set_exception(EngineError(f"engine {self.first + index} could not be ended: {error}"))
            # No one may wait for it.
            freed.exception()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
