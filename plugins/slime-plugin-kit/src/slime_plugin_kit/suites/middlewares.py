"""Router middlewares, around an engine call that follows a script."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from typing import Any

import numpy as np

from slime_core.contracts.middleware import RouterMiddleware
from slime_core.errors import EngineError
from slime_core.types.completion import Completion, GenerateRequest, SamplingParams
from slime_plugin_kit.case import Case
from slime_plugin_kit.event_loop import run
from slime_plugin_kit.scripted_engine import ScriptedEngine

KEPT = ("request_id", "token_ids", "sampling", "seed")
"""Fields of a request that a middleware must keep; it may choose another engine."""


def request_of(number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"train/{number}/0",
        token_ids=np.arange(2, 6 + number % 4, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=6 + number, temperature=0.7, stop=("x",)),
        seed=1000 + number,
        session_id=f"train/{number}",
    )


async def straight(request: GenerateRequest) -> Completion:
    return (await ScriptedEngine().generate([request]))[0]


def require_same(what: str, got: Any, expected: Any, names: tuple[str, ...]) -> None:
    for name in names:
        one, other = getattr(got, name), getattr(expected, name)
        same = np.array_equal(one, other) if isinstance(other, np.ndarray) else one == other
        assert same, f"{what}: {name} is {one}, was {other}"


def test_requests_and_completions_pass_through(case: Case) -> None:
    async def scene() -> None:
        middleware: RouterMiddleware = case.build()
        seen: list[GenerateRequest] = []

        async def call_next(request: GenerateRequest) -> Completion:
            seen.append(request)
            return await straight(request)

        for number in range(5):
            request = request_of(number)
            completion = await middleware(request, call_next)
            require_same("the request on its way", seen[-1], request, KEPT)
            names = tuple(
                f.name for f in fields(Completion) if f.name not in ("engine_index", "extra", "cached_tokens")
            )
            require_same("the completion on its way back", completion, await straight(request), names)

    run(scene())


def test_errors_surface(case: Case) -> None:
    async def scene() -> None:
        middleware: RouterMiddleware = case.build()

        async def call_next(request: GenerateRequest) -> Completion:
            raise EngineError("the engine died")

        try:
            completion = await middleware(request_of(0), call_next)
        except EngineError:
            pass
        else:
            raise AssertionError(f"the engine died, and it returned {completion}")
        # And the next request is served.
        await middleware(request_of(1), straight)

    run(scene())


def test_requests_keep_apart(case: Case) -> None:
    async def scene() -> None:
        middleware: RouterMiddleware = case.build()
        requests = [request_of(number) for number in range(20)]
        responses = await asyncio.gather(*(middleware(request, straight) for request in requests))
        for request, response in zip(requests, responses, strict=True):
            require_same(
                f"beside others, the response to {request.request_id}",
                response,
                await straight(request),
                ("token_ids",),
            )

    run(scene())


def test_a_cancelled_request_ends(case: Case) -> None:
    async def scene() -> None:
        middleware: RouterMiddleware = case.build()
        begun = asyncio.Event()

        async def for_ever(request: GenerateRequest) -> Completion:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError("never")

        task = asyncio.ensure_future(middleware(request_of(0), for_ever))
        await begun.wait()
        task.cancel()
        try:
            completion = await task
        except asyncio.CancelledError:
            pass
        else:
            raise AssertionError(f"its caller went away, and it returned {completion}")
        await middleware(request_of(1), straight)

    run(scene())


def test_counters_are_numbers(case: Case) -> None:
    async def scene() -> None:
        middleware: RouterMiddleware = case.build()
        await middleware(request_of(0), straight)
        json.dumps(dict(middleware.metrics()), allow_nan=False)

    run(scene())
