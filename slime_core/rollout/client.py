"""EngineClient: one entrance to all engines, with a bound on what is in flight.

Requests that are made in one turn of the event loop travel together and enter an engine together. So a wave of prompts
makes the same batches each time, and ten thousand requests are a few messages.

Once somebody watches, an engine that fails is taken out of service: its requests go to the others, or wait until one is
back, and publishes pass it by. Whoever watches puts another engine in its place.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from slime_core.contracts.engine import Memory
from slime_core.contracts.middleware import Next, RouterMiddleware
from slime_core.errors import EngineError, EngineRefused, EngineUnavailable
from slime_core.rollout.engine_slot import EngineHandle, Message, OneEngine, Seat
from slime_core.rollout.request_script import RequestScript
from slime_core.rollout.waiting import WaitingRequests
from slime_core.types.completion import Completion, FinishReason, GenerateRequest

OnLoss: TypeAlias = Callable[[int, Exception, int], None]
"""Told which engine was taken out of service, why, and how many of its requests are dispatched again."""

HOLDS: Final = frozenset({"pause", "sleep"})
FREES: Final = {"resume": "pause", "wake": "sleep"}
"""Calls that hold engines back, and those that end that."""


class EngineClient:
    """Spreads requests over engines in turn, at most `concurrency` per engine; the rest wait in order."""

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        *,
        concurrency: int,
        middlewares: Sequence[RouterMiddleware] = (),
        max_losses: int = 3,
        call_limit_s: float = 600.0,
    ) -> None:
        """While engines are watched: `max_losses` is how often a request may be lost with its engine before it fails,
        `call_limit_s` what an engine gets for a call of `each` before it counts as hung."""
        self._seats = tuple(Seat(index, engine, concurrency) for index, engine in enumerate(engines))
        self._concurrency = concurrency
        self._max_losses = max_losses
        self._call_limit_s = call_limit_s
        self._on_loss: OnLoss | None = None
        self._failure: Exception | None = None
        self._losses: Counter[str] = Counter()
        self.script = RequestScript()
        """In a replay, where requests go, as long as it goes on."""
        self.num_lost = 0
        """Engines that were taken out of service so far."""
        self._held: set[str] = set()
        self._awake = asyncio.Event()
        self._awake.set()
        self._serving = asyncio.Event()
        self._serving.set()
        self._answers: dict[str, asyncio.Future[Completion]] = {}
        self._sent: dict[str, float] = {}
        """When requests in flight got their place."""
        self._next_engine = 0
        # Middlewares are told which engines there are; a request that still carries this very tuple goes to any of them.
        self._every = tuple(range(len(self._seats))) if middlewares else ()
        self._waiting = WaitingRequests(self._every)
        # Requests among the middlewares, and whether they were aborted meanwhile.
        self._entered: dict[str, bool] = {}
        self._flush_planned = False
        self._streams: set[asyncio.Task[None]] = set()
        self._entrance: Next = self._submit
        for middleware in reversed(middlewares):
            self._entrance = around(middleware, self._entrance)

    @property
    def num_engines(self) -> int:
        """Those in service."""
        return sum(seat.serves for seat in self._seats)

    @property
    def indices(self) -> tuple[int, ...]:
        """Of the engines in service."""
        return tuple(seat.index for seat in self._seats if seat.serves)

    @property
    def at_rest(self) -> bool:
        """Engines are paused or asleep."""
        return bool(self._held)

    @property
    def asleep(self) -> bool:
        return not self._awake.is_set()

    async def awake(self) -> None:
        """Returns when engines are not asleep: till then their devices may be somebody else's."""
        await self._awake.wait()

    async def serving(self) -> None:
        """Returns when an engine is in service; raises the error for which there will be none."""
        await self._serving.wait()
        if self._failure is not None:
            raise self._failure

    async def generate(self, request: GenerateRequest) -> Completion:
        """Through the middlewares to an engine and back. EngineError if the engine fails; of watched ones
        EngineUnavailable if the request was lost too often."""
        if not self._every:
            return await self._submit(request)
        self._entered[request.request_id] = False
        try:
            return await self._entrance(replace(request, engines=self._every))
        finally:
            self._entered.pop(request.request_id, None)

    async def each(self, method: str, *args: Any) -> list[Any]:
        """See `ask`; results in the order of engines."""
        return list((await self.ask(method, *args)).values())

    async def ask(self, method: str, *args: Any) -> dict[int, Any]:
        """Calls a method of the engine contract on every engine in service at once; results by index. A watched engine that
        fails is taken out of service and gives no result; one that refuses is well, and the refusal is raised."""
        if self._failure is not None and method not in HOLDS:
            raise self._failure
        if method in HOLDS:
            self._note(self._held | {method})
        serving = [seat for seat in self._seats if seat.serves]
        if self._failure is not None:
            # The run ends, for a reason that is known. What it has trained is saved before, on devices that those engines give
            # back that still can.
            calls = (asyncio.wait_for(seat.engine.call(method, *args), self._call_limit_s) for seat in serving)
            await asyncio.gather(*calls, return_exceptions=True)
            return {}
        answers = await asyncio.gather(*(self._call(seat, method, args) for seat in serving))
        if (freed := FREES.get(method)) is not None and (freed != "sleep" or wakes_whole(*args)):
            self._note(self._held - {freed})
        return {seat.index: answer[0] for seat, answer in zip(serving, answers, strict=True) if answer}

    async def ask_one(self, index: int, method: str, *args: Any) -> tuple[Any, ...]:
        """As `ask`, of one engine in service: its result, or nothing if it was lost."""
        return await self._call(self._seats[index], method, args)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests; those still waiting here, or in a middleware, are answered with nothing."""
        for request_id in request_ids:
            if request_id in self._entered and request_id not in self._answers:
                self._entered[request_id] = True
        for request in self._waiting.take(request_ids):
            answer = self._answers.pop(request.request_id)
            if not answer.done():
                answer.set_result(Completion.empty(request, FinishReason.ABORT))
        running = [request_id for request_id in request_ids if request_id in self._answers]
        if running and self._failure is None:
            await self.each("abort", running)

    # ---------------------------------------------------------------- engines that come and go

    def watch(self, on_loss: OnLoss | None) -> None:
        """From now on an engine that fails is taken out of service, and `on_loss` is told. Before, or with None, its failure
        is that of whoever asked."""
        self._on_loss = on_loss

    @property
    def watched(self) -> bool:
        return self._on_loss is not None

    def engine(self, index: int) -> EngineHandle | None:
        """None while the seat has no engine in service."""
        seat = self._seats[index]
        return seat.engine if seat.serves else None

    def link(self, engine: EngineHandle) -> OneEngine:
        """What a transport sees of an engine that is to be admitted."""
        return OneEngine(engine, self._call_limit_s)

    def quarantine(self, index: int, error: Exception) -> None:
        """Takes an engine out of service. Requests that it had not answered are dispatched again, before all that wait."""
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
        """Puts an engine into service. Until it has given an answer it gets one request at a time."""
        self._seats[index].seat(engine, bound=1)
        self._serving.set()
        self._plan_flush()

    def fail(self, error: Exception) -> None:
        """There is no help for the engines: whoever waits for an answer, or asks later, gets this error."""
        if self._failure is not None:
            return
        self._failure = error
        self._serving.set()
        self._waiting.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    def _note(self, held: set[str]) -> None:
        self._held = held
        if "sleep" in held:
            self._awake.clear()
        else:
            self._awake.set()

    def _survives(self, request: GenerateRequest, index: int, error: Exception) -> bool:
        """Whether a request that was lost is to be sent again."""
        name = request.request_id
        answer = self._answers.get(name)
        if answer is None or answer.done():
            return False
        self._losses[name] += 1
        if self._losses[name] <= self._max_losses:
            return True
        failure = EngineUnavailable(
            f"request {name} was lost {self._losses[name]} times with the engine that had it (--max-retries "
            f"{self._max_losses}); the last time with engine {index}: {error}"
        )
        failure.__cause__ = error
        answer.set_exception(failure)
        return False

    async def _call(self, seat: Seat, method: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """The result, or nothing of an engine that was lost meanwhile."""
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
            # Whatever it is, this engine cannot be relied on.
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
        if request.request_id in self._answers:
            raise EngineError(f"request id {request.request_id} is in flight already; ids are unique")
        if request.text is not None and not len(request.token_ids):
            raise EngineError(
                f"request {request.request_id} has a text but no tokens, and engines take tokens: router.middlewares "
                "needs one that knows them; `slime plugins` says which there are."
            )
        if not set(request.engines) <= set(range(len(self._seats))):
            raise EngineError(
                f"request {request.request_id} asks for engines {request.engines}; there are {len(self._seats)}"
            )
        answer: asyncio.Future[Completion] = loop.create_future()
        self._answers[request.request_id] = answer
        self._waiting.append(request)
        self._plan_flush()
        entered = time.perf_counter()
        try:
            completion = await answer
            sent = self._sent.get(request.request_id, entered)
            return replace(completion, queue_s=sent - entered)
        finally:
            self._answers.pop(request.request_id, None)
            self._sent.pop(request.request_id, None)
            self._losses.pop(request.request_id, None)
            if answer.cancelled():
                self._waiting.take([request.request_id])

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        now = time.perf_counter()
        chosen: list[list[GenerateRequest]] = [[] for _ in self._seats]
        held: list[GenerateRequest] = []
        full: set[tuple[int, ...]] = set()
        while any(seat.has_room for seat in self._seats) and (request := self._waiting.pop(full)) is not None:
            if (seat := self._free_seat(request)) is None:
                held.append(request)
                if not self.script.goes_on:
                    full.add(self._waiting.engines_of(request))
                continue
            chosen[seat.index].append(request)
            self._sent[request.request_id] = now
            seat.running += 1
        self._waiting.put_first(held)
        for seat, requests in zip(self._seats, chosen, strict=True):
            if requests:
                message = Message({request.request_id: request for request in requests})
                seat.messages[message] = None
                message.task = asyncio.create_task(self._stream(seat, message, requests))
                self._streams.add(message.task)
                message.task.add_done_callback(self._streams.discard)

    def _free_seat(self, request: GenerateRequest) -> Seat | None:
        """Where a middleware wants it, unless nothing serves there; else engines in turn, so that where a request goes does
        not depend on how fast others are answered."""
        if self.script.goes_on:
            recorded = self.script.engine_of(request.request_id)
            if recorded is None or not self._seats[recorded].has_room:
                return None
            self.script.sent(request.request_id)
            return self._seats[recorded]
        if request.engines and request.engines is not self._every:
            wanted = [seat for seat in map(self._seats.__getitem__, request.engines) if seat.serves]
            if wanted:
                return next((seat for seat in wanted if seat.has_room), None)
        for offset in range(len(self._seats)):
            number = (self._next_engine + offset) % len(self._seats)
            if self._seats[number].has_room:
                self._next_engine = (number + 1) % len(self._seats)
                return self._seats[number]
        return None

    async def _stream(self, seat: Seat, message: Message, requests: Sequence[GenerateRequest]) -> None:
        number = seat.index
        failure: Exception | None = None
        try:
            async for completion in seat.engine.generate(requests):
                if message not in seat.messages:
                    # Taken out of service meanwhile; what it says now may have been asked of another one.
                    return
                if message.open.pop(completion.request_id, None) is None:
                    raise EngineError(f"engine {number} answered {completion.request_id}, which it was not asked for")
                seat.running -= 1
                seat.bound = self._concurrency
                answer = self._answers.get(completion.request_id)
                if answer is not None and not answer.done():
                    answer.set_result(completion)
                if self._waiting:
                    self._plan_flush()
            if message.open:
                failure = EngineError(f"engine {number} ended its answer before all requests were done")
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is judged, or reaches those who wait for it
            failure = error
        finally:
            if message in seat.messages:
                self._end(seat, message, failure)

    def _end(self, seat: Seat, message: Message, failure: Exception | None) -> None:
        """A message has ended. If the engine failed and is watched, it goes out of service; else who waits gets the failure."""
        if failure is not None and self._on_loss is not None and not isinstance(failure, EngineRefused):
            self.quarantine(seat.index, failure)
            return
        del seat.messages[message]
        seat.running -= len(message.open)
        for request_id in message.open:
            answer = self._answers.get(request_id)
            if answer is not None and not answer.done():
                answer.set_exception(failure or EngineError(f"engine {seat.index} was given up"))
        if self._waiting:
            self._plan_flush()


def wakes_whole(tags: Sequence[Memory] | None = None) -> bool:
    """With its weights alone an engine can be loaded, but does not generate."""
    return tags is None or Memory.KV_CACHE in tags


def around(middleware: RouterMiddleware, call_next: Next) -> Next:
    async def call(request: GenerateRequest) -> Completion:
        return await middleware(request, call_next)

    return call
