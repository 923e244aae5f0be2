"""Devices that several trained roles may share, and take turns on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

from slime_core.workers.stopwatch import Stopwatch


class DeviceUser(Protocol):
    """A role's ranks on these devices."""

    async def call_all(self, method: str, *args: Any) -> list[Any]: ...


class Devices:
    """One role works at a time, in the order of the calls of `turn`; roles on other devices work meanwhile. With `offload`
    all but that role sleep: call `settle` for every role as soon as it is set up, before the next one is. Without it roles
    keep what they hold, and free what they only cached before engines onload."""

    def __init__(self, *, offload: bool = False) -> None:
        self.offload = offload
        self._turns = asyncio.Lock()
        self._awake: dict[DeviceUser, None] = {}
        """At most one with `offload`; else those that may have cached memory."""
        self._weights_only = False
        self.times = Stopwatch()

    async def settle(self, tenant: DeviceUser) -> None:
        """Puts a role that was just set up to sleep."""
        if self.offload:
            with self.times.of("sleep"):
                await tenant.call_all("sleep")

    @contextlib.asynccontextmanager
    async def turn(self, tenant: DeviceUser, *, weights_only: bool = False) -> AsyncIterator[None]:
        """Inside, `tenant` has the devices, until another role's turn. `weights_only`: it holds only what it exports."""
        async with self._turns:
            if self.offload:
                await self._hand_over(tenant, weights_only)
            elif weights_only:
                await self._put_to_sleep()
            self._awake[tenant] = None
            yield

    async def vacate(self) -> None:
        """All roles sleep, or free what they cached: engines may onload until the next turn."""
        async with self._turns:
            await self._put_to_sleep()

    async def _hand_over(self, tenant: DeviceUser, weights_only: bool) -> None:
        if tenant not in self._awake:
            await self._put_to_sleep()
        elif self._weights_only == weights_only:
            return
        shrinks = tenant in self._awake and weights_only
        # If a rank fails below, others have been offloaded: the next turn wakes all of them.
        self._awake, self._weights_only = {tenant: None}, True
        with self.times.of("sleep" if shrinks else "wake_up"):
            await tenant.call_all("sleep" if shrinks else "wake_up", *([True] if weights_only else []))
        self._weights_only = weights_only

    async def _put_to_sleep(self) -> None:
        before, self._awake, self._weights_only = self._awake, {}, False
        for tenant in before:
            with self.times.of("sleep"):
                await tenant.call_all("sleep" if self.offload else "free_cache")
