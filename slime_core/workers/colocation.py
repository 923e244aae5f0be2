"""Residency: what trainer and engines keep on the devices that they share, phase by phase.

| phase   | engines       | trainer       |
|---------|---------------|---------------|
| ROLLOUT | everything    | nothing       |
| TRAIN   | nothing       | everything    |
| SYNC    | their weights | its weights   |

Whoever gives memory back does so before the other one takes it. Either side may be left out of this
(`launcher.offload_rollout`, `launcher.offload_train`), and keeps everything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from slime_core.contracts.engine import Memory
from slime_core.contracts.transport import EngineLink
from slime_core.workers.devices import Devices, Tenant


class Phase(StrEnum):
    ROLLOUT = "rollout"
    TRAIN = "train"
    SYNC = "sync"


ENGINES: Final[Mapping[Phase, frozenset[Memory]]] = {
    Phase.ROLLOUT: frozenset(Memory),
    Phase.TRAIN: frozenset(),
    Phase.SYNC: frozenset({Memory.WEIGHTS}),
}
"""What engines hold. Trainers hold everything within a turn, their weights within one for SYNC, and nothing in ROLLOUT."""


class Residency:
    """The phases of a run. Without shared devices every phase is free, and several may be at once."""

    def __init__(self, devices: Devices, engines: EngineLink | None, *, shared: bool, offload_rollout: bool) -> None:
        """`devices`: the policy's. `engines` are awake. `shared`: they stand on `devices`."""
        self._devices = devices
        self._engines = engines if offload_rollout else None
        self._offloads = shared and (offload_rollout or devices.offload)
        self._held = frozenset(Memory)
        self._leaving: set[asyncio.Future[None]] = set()
        self._phase = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """No phase begins inside but those that this very task asks for."""
        task = asyncio.current_task()
        if not self._offloads or self._holder is task:
            yield
            return
        async with self._phase:
            self._holder = task
            try:
                yield
            finally:
                self._holder = None

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """An engine may be started inside, and takes all the memory that it holds in ROLLOUT."""
        async with self.alone():
            await self.rollout()
            yield

    def leaves(self, gone: asyncio.Future[None]) -> None:
        """An engine that is out of service holds its memory until this is done: no trainer takes it before."""
        self._leaving.add(gone)
        gone.add_done_callback(self._leaving.discard)

    async def settle(self, engine: EngineLink) -> None:
        """Puts an engine that was just started to sleep, until it is brought its weights `beside` the others."""
        if self._offloads and self._engines is not None:
            await engine.each("sleep", in_order(frozenset(Memory)))

    async def rollout(self, *, beside: EngineLink | None = None) -> None:
        """Engines may generate from here on, until another phase. `beside`: an engine that is not in service yet."""
        if self._offloads:
            async with self.alone():
                await self._devices.vacate()
                await self._wake(Phase.ROLLOUT, beside)

    @contextlib.asynccontextmanager
    async def train(self) -> AsyncIterator[None]:
        """Roles may take their turns inside; no engine generates."""
        if not self._offloads:
            yield
            return
        async with self.alone():
            await self._put_to_sleep(Phase.TRAIN, None)
            yield

    @contextlib.asynccontextmanager
    async def sync(self, policy: Tenant, *, beside: EngineLink | None = None) -> AsyncIterator[None]:
        """The policy's weights can be brought to the engines inside, which are paused. It is the policy's turn."""
        if not self._offloads:
            async with self._devices.turn(policy):
                yield
            return
        async with self.alone():
            await self._put_to_sleep(Phase.SYNC, beside)
            async with self._devices.turn(policy, weights_only=True):
                await self._wake(Phase.SYNC, beside)
                yield

    def times(self) -> Mapping[str, float]:
        """Metrics: what moving memory took, since this was asked before."""
        return self._devices.times.taken()

    async def _put_to_sleep(self, phase: Phase, beside: EngineLink | None) -> None:
        """Takes from the engines what they do not hold in this phase."""
        if self._engines is None:
            return
        surplus = frozenset(Memory) - ENGINES[phase]
        if gone := self._held & surplus:
            # What was left of a rollout that was given up does not end by itself.
            await self._engines.each("pause")
            with self._devices.times.of("engine_sleep"):
                await self._engines.each("sleep", in_order(gone))
            self._held -= gone
        if beside is not None:
            await beside.each("sleep", in_order(surplus))
        # Also those that were lost while they were asked here.
        while self._leaving:
            await asyncio.wait(self._leaving)

    async def _wake(self, phase: Phase, beside: EngineLink | None) -> None:
        """Gives the engines what they hold in this phase."""
        if self._engines is None:
            return
        if missing := ENGINES[phase] - self._held:
            with self._devices.times.of("engine_wake_up"):
                # Engines go on waking if this is broken off.
                self._held |= missing
                await self._engines.each("wake", in_order(missing))
            if phase is Phase.ROLLOUT:
                await self._engines.each("resume")
        if beside is not None:
            await beside.each("wake", in_order(ENGINES[phase]))


def in_order(tags: frozenset[Memory]) -> Sequence[Memory]:
    return [tag for tag in Memory if tag in tags]
