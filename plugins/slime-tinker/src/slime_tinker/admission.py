"""Admission: at most so many sequences are sampled at a time, and tenants take turns at the places."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator


class Admission:
    def __init__(self, places: int) -> None:
        self._free = places
        self._places = places
        self._held: Counter[str] = Counter()
        self._admitted: Counter[str] = Counter()
        """Number of the last admission of each tenant."""
        self._numbers = itertools.count(1)
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    @contextlib.asynccontextmanager
    async def place(self, tenant: str, number: int) -> AsyncIterator[None]:
        """Inside, `number` sequences of the tenant are sampled; more than there are places count as all of them."""
        number = min(number, self._places)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((number, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(tenant, number)
            else:
                self._waiting[tenant] = deque(entry for entry in self._waiting[tenant] if entry[1] is not turn)
                self._admit()
            raise
        try:
            yield
        finally:
            self._leave(tenant, number)

    def _leave(self, tenant: str, number: int) -> None:
        self._free += number
        self._held[tenant] -= number
        self._admit()

    def _admit(self) -> None:
        """The tenant that holds the fewest places is next, of several the one that was longest ago; none overtakes it, so that
        large requests get their turn."""
        while True:
            waiting = [tenant for tenant, line in self._waiting.items() if line]
            if not waiting:
                return
            tenant = min(waiting, key=lambda name: (self._held[name], self._admitted[name]))
            number, turn = self._waiting[tenant][0]
            if turn.cancelled():
                # Whose task has not run since it was cancelled.
                self._waiting[tenant].popleft()
                continue
            if number > self._free:
                return
            self._waiting[tenant].popleft()
            self._free -= number
            self._held[tenant] += number
            self._admitted[tenant] = next(self._numbers)
            turn.set_result(None)
