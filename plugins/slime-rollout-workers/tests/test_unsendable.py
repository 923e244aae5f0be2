"""Requests, calls and questions that cannot be pickled fail where they were made, and responses where they are awaited."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime_core.errors import PluginError
from slime_core.rollout.groups import RunningGroup
from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams
from slime_core.types.prompt import Prompt
from slime_rollout_workers.channel import Unsendable
from slime_rollout_workers.driver_group import DriverGroup
from slime_rollout_workers.flat import REQUEST
from slime_rollout_workers.group_client import Requests
from slime_rollout_workers.messages import Call, Completed, Request
from slime_rollout_workers.worker_requests import WorkerRequests

PATIENCE_S = 30.0
CAUSE = AttributeError("no class of this name")
REQUEST_0 = GenerateRequest(
    request_id="train/0/0", token_ids=np.array([1], np.int32), sampling=SamplingParams(max_new_tokens=4), seed=0
)


class Sent:
    """Messages of one kind cannot be sent, unless they have an error."""

    def __init__(self, unsendable: type) -> None:
        self._unsendable = unsendable
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    def __call__(self, message: Any, unsendable: Unsendable | None = None, /) -> None:
        if isinstance(message, self._unsendable) and not isinstance(getattr(message, "result", None), Exception):
            assert unsendable is not None
            asyncio.get_running_loop().call_soon(unsendable, CAUSE)
        else:
            self.messages.put_nowait(message)


async def test_a_request_fails_where_it_was_made() -> None:
    requests = Requests(Sent(Request))
    with pytest.raises(PluginError, match=r"^request train/0/0: cannot be sent .*AttributeError: no class") as raised:
        await asyncio.wait_for(requests.complete(0, REQUEST_0), PATIENCE_S)
    assert raised.value.__cause__ is CAUSE


async def test_a_response_fails_where_it_is_awaited() -> None:
    """An engine may put anything into its completion."""
    sent = Sent(Completed)

    async def generate(request: GenerateRequest) -> Completion:
        return Completion.empty(request, FinishReason.STOP)

    runner: Any = SimpleNamespace(client=SimpleNamespace(generate=generate))
    running = RunningGroup(prompt=Prompt(group_index=0, text="", token_ids=np.array([1], np.int32)))
    group = DriverGroup(number=0, runner=runner, pickled=b"", running=running)
    WorkerRequests("rollout worker 0", sent).take(Request(5, 0, REQUEST.pack(REQUEST_0)), group)
    completed = await asyncio.wait_for(sent.messages.get(), PATIENCE_S)
    assert completed.number == 5
    assert isinstance(completed.result, PluginError)
    assert str(completed.result).startswith("the response to request train/0/0: cannot be sent")


async def test_a_call_fails_where_it_was_made() -> None:
    """By the engine's caller, with what the request has."""
    sent = Sent(Call)
    callers = []

    async def generate(request: GenerateRequest) -> Completion:
        callers.append(request.caller)
        return Completion.empty(request, FinishReason.STOP)

    runner: Any = SimpleNamespace(client=SimpleNamespace(generate=generate))
    running = RunningGroup(prompt=Prompt(group_index=0, text="", token_ids=np.array([1], np.int32)))
    group = DriverGroup(number=0, runner=runner, pickled=b"", running=running)
    WorkerRequests("rollout worker 0", sent).take(Request(5, 0, REQUEST.pack(REQUEST_0)), group)
    await asyncio.wait_for(sent.messages.get(), PATIENCE_S)
    (caller,) = callers
    assert caller is not None
    with pytest.raises(PluginError, match=r"^an engine's call: cannot be sent"):
        await asyncio.wait_for(caller.call(defaultdict(lambda: 0)), PATIENCE_S)
