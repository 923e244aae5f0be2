"""GroupClient: the engine client of one group in a worker. The driver sends its requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from slime_core.rollout.client import EngineClient
from slime_core.types.completion import Completion, GenerateRequest
from slime_rollout_workers.channel import Send
from slime_rollout_workers.flat import COMPLETION, REQUEST
from slime_rollout_workers.messages import AbortRequests, CancelRequest, Completed, Request
from slime_rollout_workers.travelling_error import raised_here
from slime_rollout_workers.unsendable import unsendable_error


class Requests:
    """The requests of a worker that the driver has not responded to."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self._numbers = itertools.count()
        self._responses: dict[int, asyncio.Future[Completion]] = {}

    async def complete(self, group: int, request: GenerateRequest) -> Completion:
        number = next(self._numbers)
        response: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._responses[number] = response

        def fail(cause: Exception) -> None:
            if not response.done():
                response.set_exception(unsendable_error(f"request {request.request_id}", cause))

        self.send(Request(number, group, REQUEST.pack(request)), fail)
        try:
            return await response
        finally:
            del self._responses[number]
            if response.cancelled():
                self.send(CancelRequest(number))

    def take(self, completed: Completed) -> None:
        response = self._responses.get(completed.number)
        if response is None or response.done():
            return
        if isinstance(completed.result, Exception):
            response.set_exception(raised_here(completed.result))
        else:
            response.set_result(COMPLETION.unpack(completed.result))


class GroupClient(EngineClient):
    """Has no engines of its own."""

    def __init__(self, group: int, requests: Requests) -> None:
        super().__init__([], concurrency=1)
        self._group = group
        self._requests = requests

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._requests.complete(self._group, request)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Returns at once: the aborted requests get their completions."""
        self._requests.send(AbortRequests(tuple(request_ids)))
