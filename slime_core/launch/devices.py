"""Devices: what several trained roles may share. They take turns on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol


class Tenant(Protocol):
    """A role's ranks on these devices."""

    async def each(self, method: str) -> list[Any]: ...


class Devices:
    """One role works at a time, in the order of asking; roles on other devices work meanwhile.

    With `offload` all but that role sleep: `settle` every role as soon as it is set up, before the next one is.
    """

    def __init__(self, *, offload: bool = False) -> None:
        self._offload = offload
        self._turns = asyncio.Lock()
        self._awake: Tenant | None = None

    async def settle(self, tenant: Tenant) -> None:
        """Puts a role that was just set up to sleep."""
        if self._offload:
            await tenant.each("sleep")

    @contextlib.asynccontextmanager
    async def turn(self, tenant: Tenant) -> AsyncIterator[None]:
        """The devices are `tenant`'s inside. It stays awake after it, until another one's turn."""
        async with self._turns:
            if self._offload and self._awake is not tenant:
                before, self._awake = self._awake, None
                if before is not None:
                    await before.each("sleep")
                await tenant.each("wake")
                self._awake = tenant
            yield
