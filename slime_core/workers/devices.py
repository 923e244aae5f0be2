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
    """One role works at a time, in the order of asking; roles on other devices work meanwhile.

    With `offload` all but that role sleep: `settle` every role as soon as it is set up, before the next one is.
    """

    def __init__(self, *, offload: bool = False) -> None:
        self._offload = offload
        self._turns = asyncio.Lock()
        self._awake: Tenant | None = None
        self._weights_only = False
        self.times = MoveTimes()

    @property
    def offload(self) -> bool:
        return self._offload

    async def settle(self, tenant: Tenant) -> None:
        """Puts a role that was just set up to sleep."""
        if self._offload:
            with self.times.of("sleep"):
                await tenant.each("sleep")

    @contextlib.asynccontextmanager
    async def turn(self, tenant: Tenant, *, weights_only: bool = False) -> AsyncIterator[None]:
        """The devices are `tenant`'s inside. It stays awake after it, until another one's turn. With `weights_only` it
        holds no more on them than it exports."""
        async with self._turns:
            if self._offload:
                await self._hand_over(tenant, weights_only)
            yield

    async def vacate(self) -> None:
        """All roles sleep: the devices are somebody else's until the next turn."""
        async with self._turns:
            await self._put_to_sleep()

    async def _hand_over(self, tenant: Tenant, weights_only: bool) -> None:
        if self._awake is tenant and not weights_only and not self._weights_only:
            return
        if self._awake is tenant and weights_only:
            if not self._weights_only:
                # If a rank fails here or below, others have moved: the next turn wakes all of them.
                self._weights_only = True
                with self.times.of("sleep"):
                    await tenant.each("sleep", True)
        else:
            if self._awake is not tenant:
                await self._put_to_sleep()
            self._awake, self._weights_only = tenant, True
            with self.times.of("wake_up"):
                await (tenant.each("wake", True) if weights_only else tenant.each("wake"))
        self._awake, self._weights_only = tenant, weights_only

    async def _put_to_sleep(self) -> None:
        before, self._awake, self._weights_only = self._awake, None, False
        if before is not None:
            with self.times.of("sleep"):
                await before.each("sleep")
