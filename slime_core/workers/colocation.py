"""ColocationManager: what trainer and engines keep on the devices that they share, phase by phase.

| phase   | engines       | trainer       |
|---------|---------------|---------------|
| ROLLOUT | everything    | nothing       |
| TRAIN   | nothing       | everything    |
| SYNC    | their weights | its weights   |

One side offloads before the other one onloads. Either side may keep everything on the device
(`launcher.offload_rollout`, `launcher.offload_train`); a trainer then frees what it only caches.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from slime_core.contracts.engine import MemoryTag
from slime_core.contracts.transport import EngineGroup
from slime_core.errors import SlimeError
from slime_core.workers.devices import Devices, DeviceUser
from slime_core.workers.stopwatch import Stopwatch


class Phase(StrEnum):
    ROLLOUT = "rollout"
    TRAIN = "train"
    SYNC = "sync"


WAKE_S: Final = 60.0
"""For engines whose sleep or wake-up was interrupted. One that is half awake would not go to sleep for the checkpoint."""
ENGINES: Final[Mapping[Phase, frozenset[MemoryTag]]] = {
    Phase.ROLLOUT: frozenset(MemoryTag),
    Phase.TRAIN: frozenset(),
    Phase.SYNC: frozenset({MemoryTag.WEIGHTS}),
}
"""What engines hold. Trainers hold everything within a turn, their weights within one for SYNC, and nothing in ROLLOUT."""


class ColocationManager:
    """The phases of a run. Without shared devices every phase is free, and several may be at once."""

    def __init__(self, devices: Devices, engines: EngineGroup | None, *, shared: bool, offload_rollout: bool) -> None:
        """`devices`: the policy's. `engines`: awake. `shared`: the engines run on `devices`."""
        self._devices = devices
        self._engines = engines if shared and offload_rollout else None
        self.offloads = shared and (offload_rollout or devices.offload)
        self._held = frozenset(MemoryTag)
        self._leaving: set[asyncio.Future[None]] = set()
        self._phase = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Inside, only this task can begin a phase."""
        task = asyncio.current_task()
        if not self.offloads or self._holder is task:
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
        """Inside, an engine may be started, with all the memory that it holds in ROLLOUT."""
        async with self.exclusive():
            if self.offloads:
                # The other engines stay as they are: asleep they may have dropped their weights.
                await self._devices.vacate()
            yield

    def leaves(self, gone: asyncio.Future[None]) -> None:
        """`gone`: done when an engine that is out of service has freed its memory; no trainer onloads before. Its error ends
        the phase that waits for it."""
        self._leaving.add(gone)

    @property
    def times(self) -> Stopwatch:
        """What the time of the run is spent on."""
        return self._devices.times

    @property
    def weights_asleep(self) -> bool:
        """The engines' weights are offloaded, or dropped."""
        return MemoryTag.WEIGHTS not in self._held

    async def settle(self, engine: EngineGroup) -> None:
        """Puts an engine that was just started to sleep until a `sync` with it as `joining` gives it weights."""
        if self._engines is not None:
            await engine.call_all("sleep", in_order(frozenset(MemoryTag)))

    async def rollout(self, *, joining: EngineGroup | None = None) -> None:
        """Begins the phase ROLLOUT, in which engines generate. `joining`: an engine that is not in service yet."""
        if self.offloads:
            async with self.exclusive():
                await self._devices.vacate()
                await self._wake(Phase.ROLLOUT, joining)

    @contextlib.asynccontextmanager
    async def train(self) -> AsyncIterator[None]:
        """Inside, roles may take their turns; no engine generates."""
        async with self.exclusive():
            await self._put_to_sleep(Phase.TRAIN, None)
            yield

    @contextlib.asynccontextmanager
    async def sync(self, policy: DeviceUser, *, joining: EngineGroup | None = None) -> AsyncIterator[None]:
        """Inside, the policy's weights can be sent to the engines, which are paused. It is the policy's turn."""
        async with self.exclusive():
            await self._put_to_sleep(Phase.SYNC, joining)
            async with self._devices.turn(policy, weights_only=self.offloads):
                await self._wake(Phase.SYNC, joining)
                yield

    async def _put_to_sleep(self, phase: Phase, joining: EngineGroup | None) -> None:
        """Offloads from the engines what they do not hold in this phase."""
        if self._engines is None:
            return
        surplus = frozenset(MemoryTag) - ENGINES[phase]
        if gone := self._held & surplus:
            with self.times.of("engine_sleep"):
                # Requests of a rollout that was aborted do not end by themselves.
                await self._change(self._engines, self._held - gone, ["pause"], ["sleep", in_order(gone)])
        if joining is not None:
            await joining.call_all("sleep", in_order(surplus))
        # Includes engines that were lost during these calls.
        while self._leaving:
            done, _ = await asyncio.wait(self._leaving)
            # Raised once: then the run ends, and trainers onload to save.
            self._leaving -= done
            for left in done:
                if not left.cancelled():
                    left.result()

    async def _wake(self, phase: Phase, joining: EngineGroup | None) -> None:
        """Onloads to the engines what they hold in this phase."""
        if self._engines is None:
            return
        if missing := ENGINES[phase] - self._held:
            with self.times.of("engine_wake_up"):
                resume = [["resume"]] if phase is Phase.ROLLOUT else []
                await self._change(self._engines, ENGINES[phase], ["wake_up", in_order(missing)], *resume)
        if joining is not None:
            await joining.call_all("wake_up", in_order(ENGINES[phase]))

    async def _change(self, engines: EngineGroup, held: frozenset[MemoryTag], *calls: Sequence[Any]) -> None:
        """Makes these calls one after another, and engines then hold `held`: also if the caller is cancelled meanwhile."""

        async def change() -> None:
            self._held |= held
            for method, *args in calls:
                await engines.call_all(method, *args)
            self._held = held

        changing = asyncio.ensure_future(change())
        try:
            await asyncio.shield(changing)
        except asyncio.CancelledError:
            with contextlib.suppress(SlimeError, TimeoutError):
                await asyncio.wait_for(changing, WAKE_S)
            raise


def in_order(tags: frozenset[MemoryTag]) -> Sequence[MemoryTag]:
    return [tag for tag in MemoryTag if tag in tags]
