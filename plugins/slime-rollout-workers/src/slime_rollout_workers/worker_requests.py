"""WorkerRequests: the requests that a worker has made, and the calls that engines make through it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from slime_core.contracts.engine import CallerLost
from slime_core.registry.boundary import held
from slime_core.types.completion import Caller, Completion, FinishReason, GenerateRequest
from slime_rollout_workers.channel import Send
from slime_rollout_workers.driver_group import DriverGroup
from slime_rollout_workers.flat import COMPLETION, REQUEST
from slime_rollout_workers.messages import AbortRequests, Call, Called, CancelCall, CancelRequest, Completed, Request
from slime_rollout_workers.travelling_error import packed, raised_here
from slime_rollout_workers.unsendable import unsendable_error

ABORT_INTERVAL_S: Final = 1.0
"""An abort is repeated: an engine may not have the request yet."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request of a worker that is with the engines."""

    request: GenerateRequest
    group: DriverGroup
    task: asyncio.Task[None]


class WorkerCaller(Caller):
    """Of a worker's requests. In another process than the driver it is None: there an engine makes its calls itself."""

    def __init__(self, call: Callable[[Any], Awaitable[Any]]) -> None:
        self._call = call

    async def call(self, asked: Any) -> Any:
        return await self._call(asked)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class WorkerRequests:
    def __init__(self, name: str, send: Send) -> None:
        """`name`: the worker's."""
        self._name = name
        self._send = send
        self._caller = WorkerCaller(self._call)
        self._lost = False
        self._asked: dict[int, Asked] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_numbers = itertools.count()

    # ---------------------------------------------------------------- requests

    def take(self, message: Request, group: DriverGroup | None) -> None:
        """`group`: the request's; None: it has ended."""
        request = REQUEST.unpack(message.request, caller=self._caller)
        if group is None or group.running.stop.is_set():
            self._respond(message.number, Completion.empty(request, FinishReason.ABORT))
            return
        task = asyncio.create_task(self._serve(message.number, request, group))
        self._asked[message.number] = Asked(request, group, task)
        task.add_done_callback(lambda _: self._asked.pop(message.number))

    async def _serve(self, number: int, request: GenerateRequest, group: DriverGroup) -> None:
        result: Completion | None = None
        with held() as failed:
            # It may have been stopped since this task was made.
            if group.running.stop.is_set():
                result = Completion.empty(request, FinishReason.ABORT)
            else:
                result = await group.runner.client.generate(request)
        if failed.error is not None:
            self._fail(number, failed.error)
        else:
            assert result is not None
            self._respond(number, result)

    def _respond(self, number: int, completion: Completion) -> None:
        what = f"the response to request {completion.request_id}"
        self._send(
            Completed(number, COMPLETION.pack(completion)),
            lambda cause: self._fail(number, unsendable_error(what, cause)),
        )

    def _fail(self, number: int, error: Exception) -> None:
        self._send(Completed(number, packed(error)))

    def take_cancellation(self, message: CancelRequest) -> None:
        if (asked := self._asked.get(message.number)) is not None:
            asked.task.cancel()

    async def take_abort(self, message: AbortRequests) -> None:
        chosen = frozenset(message.request_ids)
        with held():
            # What it raises, the requests raise too.
            await self._abort([one for one in self._asked.values() if one.request.request_id in chosen])

    async def abort_groups(self, numbers: Collection[int]) -> None:
        await self._abort([one for one in self._asked.values() if one.group.number in numbers])

    async def _abort(self, asked: Collection[Asked]) -> None:
        if asked:
            # All requests of a run have one client.
            client = next(iter(asked)).group.runner.client
            await client.abort([one.request.request_id for one in asked])

    # ---------------------------------------------------------------- calls

    async def _call(self, asked: Any) -> Any:
        if self._lost:
            raise CallerLost(f"{self._name} has died")
        number = next(self._call_numbers)
        reply = self._calls[number] = asyncio.get_running_loop().create_future()

        def fail(cause: Exception) -> None:
            if not reply.done():
                reply.set_exception(unsendable_error("an engine's call", cause))

        self._send(Call(number, asked), fail)
        try:
            return await reply
        finally:
            del self._calls[number]
            if reply.cancelled():
                self._send(CancelCall(number))

    def take_call(self, message: Called) -> None:
        reply = self._calls.get(message.number)
        if reply is None or reply.done():
            return
        if isinstance(message.result, Exception):
            reply.set_exception(raised_here(message.result))
        else:
            reply.set_result(message.result)

    # ---------------------------------------------------------------- loss

    async def lose(self) -> None:
        """Ends all requests and calls of a process that has died."""
        self._lost = True
        for call in self._calls.values():
            if not call.done():
                call.set_exception(CallerLost(f"{self._name} has died"))
        while asked := list(self._asked.values()):
            await self._abort(asked)
            await asyncio.wait({one.task for one in asked}, timeout=ABORT_INTERVAL_S)

    def begin(self) -> None:
        """Called when another process is there."""
        self._lost = False
