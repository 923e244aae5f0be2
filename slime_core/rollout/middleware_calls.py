"""Calls of middlewares: around the requests to the engines, each with a time limit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from slime_core.contracts.middleware import Next, RouterMiddleware
from slime_core.errors import RolloutError
from slime_core.registry.boundary import foreign, name_of, require
from slime_core.registry.call_limit import CallLimit
from slime_core.types.completion import Completion, GenerateRequest


def around(middleware: RouterMiddleware, call_next: Next, limit: CallLimit | None = None) -> Next:
    async def passed_on(request: GenerateRequest) -> Completion:
        with contextlib.nullcontext() if limit is None else limit.passed_on():
            return await call_next(request)

    async def call(request: GenerateRequest) -> Completion:
        where = f"request {request.request_id}"
        async with contextlib.nullcontext() if limit is None else limit.call(where):
            with foreign(middleware, where, error=RolloutError):
                completion = await middleware(request, passed_on)
                require(isinstance(completion, Completion), middleware, where, completion, "a Completion")
        return completion

    return call


def middleware_limit(middleware: RouterMiddleware, seconds: float) -> CallLimit:
    def error(calls: Sequence[str]) -> RolloutError:
        more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        return RolloutError(
            f"{name_of(middleware)}, {calls[0]}{more}: it has neither passed on nor returned any for {seconds:g} s "
            "(--middleware-timeout)."
        )

    return CallLimit(seconds, error)
