"""priority: a priority queue before the engines."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_core.contracts.middleware import Next, RouterMiddleware
from slime_core.errors import EngineUnavailable

if TYPE_CHECKING:
    from slime_core.types.completion import Completion, GenerateRequest


class PriorityQueue(RouterMiddleware):
    """Forwards `concurrency` requests at a time. A free place goes to the waiting request with the highest priority, and
    among equal ones to the first; a low priority waits as long as higher ones arrive."""

    def __init__(self, *, concurrency: int, levels: Mapping[str, int], max_waiting: int | None) -> None:
        self._concurrency = concurrency
        self._levels = sorted(levels.items(), key=lambda level: -len(level[0]))
        self._max_waiting = max_waiting
        self._running = 0
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._num_waiting = 0
        self._refused = 0

    async def __call__(self, request: GenerateRequest, call_next: Next) -> Completion:
        if self._running < self._concurrency:
            self._running += 1
        else:
            await self._wait(request)
        try:
            return await call_next(request)
        finally:
            self._pass_on()

    async def _wait(self, request: GenerateRequest) -> None:
        if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
            self._refused += 1
            raise EngineUnavailable(
                f"request {request.request_id}: {self._num_waiting} requests wait already (router priority max_waiting)"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        priority = request.priority + self._level(request.request_id)
        heapq.heappush(self._waiting, (-priority, next(self._arrivals), turn))
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            # It may have got a place in the same iteration of the event loop; then the next one gets that place.
            if not turn.cancelled():
                self._pass_on()
            raise
        finally:
            self._num_waiting -= 1

    def _level(self, request_id: str) -> int:
        return next((level for prefix, level in self._levels if request_id.startswith(prefix)), 0)

    def _pass_on(self) -> None:
        """Gives the place to the next waiting request. The place is never free in between, so no new request gets it."""
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1

    def metrics(self) -> Mapping[str, Any]:
        return {"running": self._running, "waiting": self._num_waiting, "refused": self._refused}
