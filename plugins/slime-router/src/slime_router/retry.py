"""retry: sends a request again if that is safe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tenacity import AsyncRetrying, RetryCallState
from tenacity.retry import retry_if_exception_type
from tenacity.stop import stop_after_attempt, stop_before_delay
from tenacity.wait import wait_random_exponential

from slime_core.contracts.middleware import Next, RouterMiddleware
from slime_core.errors import EngineUnavailable

if TYPE_CHECKING:
    from slime_core.types.completion import Completion, GenerateRequest


class Retries(RouterMiddleware):
    """Sends a request again after EngineUnavailable: no part of a response has reached the caller, so another attempt only
    costs time. All other errors are raised: a request that an engine refuses, a bad response, a timeout."""

    def __init__(self, *, attempts: int, backoff_s: float, max_backoff_s: float, deadline_s: float) -> None:
        self._policy = AsyncRetrying(
            retry=retry_if_exception_type(EngineUnavailable),
            stop=stop_after_attempt(attempts) | stop_before_delay(deadline_s),
            wait=wait_random_exponential(multiplier=backoff_s, max=max_backoff_s),
            before_sleep=self._count,
            reraise=True,
        )
        self._repeated = 0

    async def __call__(self, request: GenerateRequest, call_next: Next) -> Completion:
        async for attempt in self._policy.copy():
            with attempt:
                return await call_next(request)
        raise AssertionError("the last attempt returns or raises")

    def _count(self, state: RetryCallState) -> None:
        self._repeated += 1

    def metrics(self) -> Mapping[str, Any]:
        return {"repeated": self._repeated}
