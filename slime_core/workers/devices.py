"""Devices: what several trained roles may share. They take turns on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

from slime_core.workers.move_times import MoveTimes


class Tenant(Protocol):
    """A role's ranks on these devices."""

    async def each(self, method: str, *args: Any) -> list[Any]: ...


class Devices:
    """One role works at a time, in the order of asking; roles on other devices work meanwhile. With `offload` all but that
    role sleep: `settle` every role as soon as it is set up, before the next one is."""

    def __init__(self, *, offload: bool = False) -> None:
        self.offload = offload
        self._turns = asyncio.Lock()
        self._awake: Tenant | None = None
        self._weights_only = False
        self.times = MoveTimes()

    async def settle(self, tenant: Tenant) -> None:
        """Puts a role that was just set up to sleep."""
        if self.offload:
            with self.times.of("sleep"):
                await tenant.each("sleep")

    @contextlib.asynccontextmanager
    async def turn(self, tenant: Tenant, *, weights_only: bool = False) -> AsyncIterator[None]:
        """The devices are `tenant`'s inside. It stays awake after it, until another one's turn. With `weights_only` it
        holds no more on them than it exports."""
        async with self._turns:
            if self.offload:
                await self._hand_over(tenant, weights_only)
            yield

    async def vacate(self) -> None:
        """All roles sleep: the devices are somebody else's until the next turn."""
        async with self._turns:
            await self._put_to_sleep()

    async def _hand_over(self, tenant: Tenant, weights_only: bool) -> None:
        if self._awake is not tenant:
            await self._put_to_sleep()
        elif self._weights_only == weights_only:
            return
        shrinks = self._awake is tenant and weights_only
        # If a rank fails below, others have moved: the next turn wakes all of them.
        self._awake, self._weights_only = tenant, True
        with self.times.of("sleep" if shrinks else "wake_up"):
            await tenant.each("sleep" if shrinks else "wake", *([True] if weights_only else []))
        self._weights_only = weights_only

    async def _put_to_sleep(self) -> None:
        before, self._awake, self._weights_only = self._awake, None, False
        if before is not None:
            with self.times.of("sleep"):
                await before.each("sleep")
