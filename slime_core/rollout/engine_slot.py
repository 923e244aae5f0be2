"""EngineSlot: an engine's place in the client. When an engine is lost, another one gets its slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from slime_core.errors import EngineError
from slime_core.types.completion import Completion, GenerateRequest


class EngineHandle(Protocol):
    """One engine, in this process or another one."""

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Yields completions as they finish. All requests enter the engine together."""

    async def call(self, method: str, *args: Any) -> Any:
        """Calls a method of `RolloutEngine`."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request that a caller waits for."""

    request: GenerateRequest
    response: asyncio.Future[Completion]
    queued: float
    """Time at which it came."""
    sent: float | None = None
    """Time at which an engine got it last."""
    losses: int = 0
    """How often it was lost with an engine."""
    alone: bool = False
    """Sent in a message of its own: those that it was sent with were refused."""


@dataclass(slots=True, eq=False)
class Message:
    """Requests that entered an engine together."""

    open: dict[str, GenerateRequest]
    """Unfinished requests, by id."""
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class EngineSlot:
    """An engine with its requests and calls in progress."""

    index: int
    engine: EngineHandle
    bound: int
    """Limit of requests in flight."""
    serves: bool = True
    running: int = 0
    messages: dict[Message, None] = field(default_factory=dict)
    """Messages with unfinished requests, in order."""
    calls: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def has_room(self) -> bool:
        return self.serves and self.running < self.bound

    def vacate(self) -> list[GenerateRequest]:
        """Takes the engine out of service and cancels its calls; returns its unfinished requests in order of arrival."""
        self.serves = False
        orphans = [request for message in self.messages for request in message.open.values()]
        for message in self.messages:
            if message.task is not None and message.task is not asyncio.current_task():
                message.task.cancel()
        for call in self.calls:
            call.cancel()
        self.messages.clear()
        self.running = 0
        return orphans

    def seat(self, engine: EngineHandle, bound: int) -> None:
        """Puts another engine into this slot."""
        self.engine, self.bound, self.serves = engine, bound, True


@dataclass(frozen=True, slots=True)
class OneEngine:
    """`slime_core.contracts.transport.EngineGroup` of an engine that is not in service yet."""

    engine: EngineHandle
    call_limit_s: float
    num_engines: ClassVar = 1

    async def call_all(self, method: str, *args: Any) -> Sequence[Any]:
        """Raises EngineError after `call_limit_s`."""
        try:
            async with asyncio.timeout(self.call_limit_s):
                return [await self.engine.call(method, *args)]
        except TimeoutError as error:
            raise EngineError(f"it has not ended {method} within {self.call_limit_s:g} s") from error
