"""EngineClient: sends requests to all engines, with a limit on the requests in flight.

Requests made in one iteration of the event loop are sent together and enter an engine together, so that a wave of prompts
forms the same batches each time, and ten thousand requests are a few messages.

With a watcher (`watch`), an engine that fails is taken out of service: its requests go to other engines, or wait for one,
and weight updates skip it. The watcher puts another engine in its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from slime_core.contracts.engine import MemoryTag
from slime_core.contracts.middleware import Next, RouterMiddleware
from slime_core.errors import EngineError, EngineRefused, EngineUnavailable
from slime_core.registry.boundary import Held, held
from slime_core.rollout.engine_slot import Asked, EngineHandle, EngineSlot, Message, OneEngine
from slime_core.rollout.middleware_calls import around, middleware_limit
from slime_core.rollout.request_replay import RequestReplay
from slime_core.rollout.waiting import WaitingRequests
from slime_core.types.completion import Completion, FinishReason, GenerateRequest

OnLoss: TypeAlias = Callable[[int, Exception, int], None]
"""Called with the engine that was taken out of service, the error, and the number of its requests that are sent again."""

HOLDS: Final = frozenset({"pause", "sleep"})
FREES: Final = {"resume": "pause", "wake_up": "sleep"}
"""Calls that stop engines from generating, and those that let them continue."""


class EngineClient:
    """Sends requests to engines by round robin, at most `concurrency` per engine; the others wait in order."""

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        *,
        concurrency: int,
        middlewares: Sequence[RouterMiddleware] = (),
        max_losses: int = 3,
        call_limit_s: float = 600.0,
        middleware_limit_s: float = 600.0,
    ) -> None:
        """For watched engines: `max_losses` is how often a request may be lost with its engine before it fails, and
        `call_limit_s` the time limit of a call of `call_all`, after which an engine counts as hung."""
        self._seats = tuple(EngineSlot(index, engine, concurrency) for index, engine in enumerate(engines))
        self._concurrency = concurrency
        self._max_losses = max_losses
        self._call_limit_s = call_limit_s
        self._on_loss: OnLoss | None = None
        self._failure: Exception | None = None
        self.script = RequestReplay()
        """During a replay: the engines that requests go to."""
        self.num_lost = 0
        """Engines taken out of service so far."""
        self._held: set[str] = set()
        self._awake = asyncio.Event()
        self._awake.set()
        self._serving = asyncio.Event()
        self._serving.set()
        self._asked: dict[str, Asked] = {}
        self._next_engine = 0
        # Middlewares get all engines in a request; one that still has this very tuple afterwards goes to any of them.
        self._every = tuple(range(len(self._seats))) if middlewares else ()
        self._waiting = WaitingRequests(self._every)
        # Requests in the middlewares, and whether they were aborted meanwhile.
        self._entered: dict[str, bool] = {}
        self._flush_planned = False
        self._abandoned: list[str] = []
        """Ids of requests whose callers were cancelled, and that engines would generate on."""
        self._streams: set[asyncio.Task[Any]] = set()
        self._entrance: Next = self._submit
        for middleware in reversed(middlewares):
            self._entrance = around(middleware, self._entrance, middleware_limit(middleware, middleware_limit_s))

    @property
    def num_engines(self) -> int:
        """Engines in service."""
        return sum(seat.serves for seat in self._seats)

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the engines in service."""
        return tuple(seat.index for seat in self._seats if seat.serves)

    @property
    def quiesce(self) -> bool:
        """Engines are paused or asleep."""
        return bool(self._held)

    @property
    def asleep(self) -> bool:
        return not self._awake.is_set()

    async def awake(self) -> None:
        """Waits until engines are not asleep; while they are, trainers may use their devices."""
        await self._awake.wait()

    async def serving(self) -> None:
        """Waits until an engine is in service; raises the error if there will be none."""
        await self._serving.wait()
        if self._failure is not None:
            raise self._failure

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sends it through the middlewares. EngineError if the engine fails; watched: EngineUnavailable if lost too often."""
        if not self._every:
            return await self._submit(request)
        self._entered[request.request_id] = False
        try:
            return await self._entrance(replace(request, engines=self._every))
        finally:
            self._entered.pop(request.request_id, None)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """See `call_by_index`; results in the order of engines."""
        return list((await self.call_by_index(method, *args)).values())

    async def call_by_index(self, method: str, *args: Any) -> dict[int, Any]:
        """Calls a method of `RolloutEngine` on all engines in service concurrently; returns results by index. A watched engine
        that fails is taken out of service and has no result; EngineRefused is raised, since that engine is healthy."""
        if self._failure is not None and method not in HOLDS:
            raise self._failure
        if method in HOLDS:
            self._note(self._held | {method})
        serving = [seat for seat in self._seats if seat.serves]
        if self._failure is not None:
            # The run ends with this error. Before, its state is saved, on devices that the engines offload that still can.
            calls = (asyncio.wait_for(seat.engine.call(method, *args), self._call_limit_s) for seat in serving)
            await asyncio.gather(*calls, return_exceptions=True)
            return {}
        responses = await asyncio.gather(*(self._call(seat, method, args) for seat in serving))
        if (freed := FREES.get(method)) is not None and (freed != "sleep" or wakes_whole(*args)):
            self._note(self._held - {freed})
        return {seat.index: response[0] for seat, response in zip(serving, responses, strict=True) if response}

    async def ask_one(self, index: int, method: str, *args: Any) -> tuple[Any, ...]:
        """`call_by_index` for one engine in service: a tuple with its result, or empty if it was lost."""
        return await self._call(self._seats[index], method, args)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Aborts these requests; those that wait here or in a middleware get empty completions."""
        for request_id in request_ids:
            if request_id in self._entered and request_id not in self._asked:
                self._entered[request_id] = True
        for request in self._waiting.take(request_ids):
            response = self._asked.pop(request.request_id).response
            if not response.done():
                response.set_result(Completion.empty(request, FinishReason.ABORT))
        running = [request_id for request_id in request_ids if request_id in self._asked]
        if running and self._failure is None:
            await self.call_all("abort", running)

    # ---------------------------------------------------------------- engines that come and go

    def watch(self, on_loss: OnLoss | None) -> None:
        """From now on failing engines are taken out of service with `on_loss`; None: their errors go to the callers."""
        self._on_loss = on_loss

    @property
    def watched(self) -> bool:
        return self._on_loss is not None

    def engine(self, index: int) -> EngineHandle | None:
        """The engine with this index; None while it is out of service."""
        seat = self._seats[index]
        return seat.engine if seat.serves else None

    def link(self, engine: EngineHandle) -> OneEngine:
        """The engine as an `EngineGroup`, for a weight update before it is admitted."""
        return OneEngine(engine, self._call_limit_s)

    def quarantine(self, index: int, error: Exception) -> None:
        """Takes an engine out of service. Its unfinished requests are sent again, before all waiting ones."""
        seat = self._seats[index]
        if not seat.serves:
            return
        assert self._on_loss is not None
        self.num_lost += 1
        again = [request for request in seat.vacate() if self._survives(request, index, error)]
        if not self.num_engines:
            self._serving.clear()
        self._waiting.put_first(again)
        if again:
            self._plan_flush()
        self._on_loss(index, error, len(again))

    def admit(self, index: int, engine: EngineHandle) -> None:
        """Puts an engine into service. Until its first response it gets one request at a time."""
        self._seats[index].seat(engine, bound=1)
        self._serving.set()
        self._plan_flush()

    def fail(self, error: Exception) -> None:
        """Fails pending and future requests with `error`."""
        if self._failure is not None:
            return
        self._failure = error
        self._serving.set()
        self._waiting.clear()
        for asked in self._asked.values():
            if not asked.response.done():
                asked.response.set_exception(error)

    def _note(self, held: set[str]) -> None:
        self._held = held
        if "sleep" in held:
            self._awake.clear()
        else:
            self._awake.set()

    def _survives(self, request: GenerateRequest, index: int, error: Exception) -> bool:
        """Counts the loss of a request; True if it is sent again, else it fails."""
        if (asked := self._waits(request)) is None:
            return False
        asked.losses += 1
        if asked.losses <= self._max_losses:
            return True
        failure = EngineUnavailable(
            f"request {request.request_id} was lost {asked.losses} times with the engine that had it (--max-retries "
            f"{self._max_losses}); the last time with engine {index}: {error}"
        )
        failure.__cause__ = error
        asked.response.set_exception(failure)
        return False

    def _waits(self, request: GenerateRequest) -> Asked | None:
        """None if its caller has gone; another request may have its id by now."""
        asked = self._asked.get(request.request_id)
        return None if asked is None or asked.request is not request or asked.response.done() else asked

    async def _call(self, seat: EngineSlot, method: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """A tuple with the result; empty if the engine was lost meanwhile."""
        if self._on_loss is None:
            return (await seat.engine.call(method, *args),)
        call = asyncio.ensure_future(seat.engine.call(method, *args))
        seat.calls.add(call)
        try:
            await asyncio.wait({call}, timeout=self._call_limit_s)
            if call.cancelled():
                return ()
            if not call.done():
                raise EngineError(f"engine {seat.index} has not ended {method} within {self._call_limit_s:g} s")
            return (call.result(),)
        except EngineRefused:
            raise
        except Exception as error:
            if self._on_loss is None:
                raise
            # After any other error the state of the engine is unknown.
            self.quarantine(seat.index, error)
            return ()
        finally:
            seat.calls.discard(call)
            call.cancel()

    # ---------------------------------------------------------------- requests

    async def _submit(self, request: GenerateRequest) -> Completion:
        loop = asyncio.get_running_loop()
        if self._failure is not None:
            raise self._failure
        if self._entered.get(request.request_id):
            return Completion.empty(request, FinishReason.ABORT)
        if request.request_id in self._asked:
            raise EngineError(f"request id {request.request_id} is in flight already; ids are unique")
        if request.text is not None and not len(request.token_ids):
            raise EngineError(
                f"request {request.request_id} has a text but no tokens, and engines accept only tokens. Add a middleware "
                "that tokenizes to router.middlewares; `slime plugins` lists them."
            )
        if not set(request.engines) <= set(range(len(self._seats))):
            raise EngineError(
                f"request {request.request_id} asks for engines {request.engines}; there are {len(self._seats)}"
            )
        asked = Asked(request, loop.create_future(), time.perf_counter())
        self._asked[request.request_id] = asked
        self._waiting.append(request)
        self._plan_flush()
        try:
            completion = await asked.response
            return replace(completion, queue_s=(asked.sent or asked.queued) - asked.queued)
        finally:
            self._asked.pop(request.request_id, None)
            if asked.response.cancelled() and not self._waiting.take([request.request_id]):
                self._abandoned.append(request.request_id)
                self._plan_flush()

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        abandoned, self._abandoned = self._abandoned, []
        if abandoned and self._failure is None:
            self._begin(self.call_all("abort", abandoned))
        now = time.perf_counter()
        chosen: list[tuple[EngineSlot, list[GenerateRequest]]] = [(seat, []) for seat in self._seats]
        held: list[GenerateRequest] = []
        full: set[tuple[int, ...]] = set()
        while any(seat.has_room for seat in self._seats) and (request := self._waiting.pop(full)) is not None:
            if (seat := self._free_seat(request)) is None:
                held.append(request)
                if not self.script.active:
                    full.add(self._waiting.engines_of(request))
                continue
            asked = self._asked[request.request_id]
            asked.sent = now
            seat.running += 1
            if asked.alone:
                chosen.append((seat, [request]))
            else:
                chosen[seat.index][1].append(request)
        self._waiting.put_first(held)
        for seat, requests in chosen:
            if requests:
                message = Message({request.request_id: request for request in requests})
                seat.messages[message] = None
                message.task = self._begin(self._stream(seat, message, requests))

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._streams.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._streams.discard(task)
        if not task.cancelled():
            # Of an abort that failed with its engine: the engine's other calls report it.
            task.exception()

    def _free_seat(self, request: GenerateRequest) -> EngineSlot | None:
        """Returns a slot with room on the engines that a middleware requires, if any of them serves; else by round robin, so
        that the choice does not depend on the speed of other requests."""
        if self.script.active:
            recorded = self.script.engine_of(request.request_id)
            if recorded is None or not self._seats[recorded].has_room:
                return None
            self.script.sent(request.request_id)
            return self._seats[recorded]
        if request.engines and request.engines is not self._every:
            requested = [seat for seat in map(self._seats.__getitem__, request.engines) if seat.serves]
            if requested:
                return next((seat for seat in requested if seat.has_room), None)
        for offset in range(len(self._seats)):
            number = (self._next_engine + offset) % len(self._seats)
            if self._seats[number].has_room:
                self._next_engine = (number + 1) % len(self._seats)
                return self._seats[number]
        return None

    async def _stream(self, seat: EngineSlot, message: Message, requests: Sequence[GenerateRequest]) -> None:
        number = seat.index
        failure = Held()
        try:
            with held() as failure:
                async for completion in seat.engine.generate(requests):
                    if message not in seat.messages:
                        # The engine was taken out of service, and another one may have the request by now.
                        return
                    self._take(seat, message, completion)
                if message.open:
                    raise EngineError(f"engine {number} ended its response before all requests were done")
        finally:
            if message in seat.messages:
                self._end(seat, message, failure.error)

    def _take(self, seat: EngineSlot, message: Message, completion: Completion) -> None:
        if (request := message.open.pop(completion.request_id, None)) is None:
            raise EngineError(f"engine {seat.index} responded to {completion.request_id}, which it did not get")
        seat.running -= 1
        seat.bound = self._concurrency
        if (asked := self._waits(request)) is not None:
            asked.response.set_result(completion)
        if self._waiting:
            self._plan_flush()

    def _end(self, seat: EngineSlot, message: Message, failure: Exception | None) -> None:
        """Called when a message has ended. With `failure`, a watched engine is quarantined; else its requests fail with it. Of
        several that were refused together one may be the cause: each is sent again, alone."""
        if failure is not None and self._on_loss is not None and not isinstance(failure, EngineRefused):
            self.quarantine(seat.index, failure)
            return
        del seat.messages[message]
        seat.running -= len(message.open)
        waiting = [asked for request in message.open.values() if (asked := self._waits(request)) is not None]
        if isinstance(failure, EngineRefused) and len(message.open) > 1:
            for asked in waiting:
                asked.alone = True
            self._waiting.put_first([asked.request for asked in waiting])
        else:
            for asked in waiting:
                asked.response.set_exception(failure or EngineError(f"engine {seat.index} was given up"))
        if self._waiting:
            self._plan_flush()


def wakes_whole(tags: Sequence[MemoryTag] | None = None) -> bool:
    """True if the engine can generate afterwards; with the weights alone it can only receive new ones."""
    return tags is None or MemoryTag.KV_CACHE in tags
