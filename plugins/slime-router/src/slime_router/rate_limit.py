"""rate_limit: requests spread over time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_core.contracts.middleware import Next, RouterMiddleware
from slime_router.errors import TooManyRequests

if TYPE_CHECKING:
    from slime_core.types.completion import Completion, GenerateRequest


class RateLimiter(RouterMiddleware):
    """The generic cell rate algorithm: `_due` is the arrival time of the next request at the exact rate; a request may come
    `burst` - 1 intervals earlier. The waiting time is known at once, so a request that would wait too long is refused."""

    def __init__(self, *, requests_per_second: float, burst: int, max_wait_s: float) -> None:
        self._interval_s = 1 / requests_per_second
        self._early_s = (burst - 1) * self._interval_s
        self._max_wait_s = max_wait_s
        self._due = 0.0
        self._delayed = 0
        self._refused = 0

    async def __call__(self, request: GenerateRequest, call_next: Next) -> Completion:
        now = asyncio.get_running_loop().time()
        due = max(now, self._due)
        wait_s = due - self._early_s - now
        if wait_s > self._max_wait_s:
            self._refused += 1
            raise TooManyRequests(
                f"request {request.request_id} would wait {wait_s:.1f} s for its turn, longer than max_wait_s = "
                f"{self._max_wait_s:g} (router rate_limit)",
                retry_after_s=wait_s,
            )
        self._due = due + self._interval_s
        if wait_s > 0:
            self._delayed += 1
            await asyncio.sleep(wait_s)
        return await call_next(request)

    def metrics(self) -> Mapping[str, Any]:
        return {"delayed": self._delayed, "refused": self._refused}
