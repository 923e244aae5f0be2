"""Seat: an engine's place in the client. When an engine is lost, another one gets its seat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from slime_core.errors import EngineError
from slime_core.types.completion import Completion, GenerateRequest


class EngineHandle(Protocol):
    """One engine, wherever it runs."""

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Completions as they end. All requests enter the engine together."""

    async def call(self, method: str, *args: Any) -> Any:
        """A method of the engine contract."""


@dataclass(slots=True, eq=False)
class Message:
    """Requests that entered an engine together."""

    open: dict[str, GenerateRequest]
    """Those that it has not answered yet, by id."""
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class Seat:
    """An engine, and what it has in hand."""

    index: int
    engine: EngineHandle
    bound: int
    """Requests that it may have in flight."""
    serves: bool = True
    running: int = 0
    messages: dict[Message, None] = field(default_factory=dict)
    """Those that are not answered in full, in order."""
    calls: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def has_room(self) -> bool:
        return self.serves and self.running < self.bound

    def vacate(self) -> list[GenerateRequest]:
        """Out of service: nothing is waited for any more. What it had not answered, in the order in which it came."""
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
        """Another engine takes the place."""
        self.engine, self.bound, self.serves = engine, bound, True


@dataclass(frozen=True, slots=True)
class OneEngine:
    """`slime_core.contracts.transport.EngineLink` of an engine that is not in service yet."""

    engine: EngineHandle
    call_limit_s: float
    num_engines: ClassVar = 1

    async def each(self, method: str, *args: Any) -> Sequence[Any]:
        """EngineError if it takes too long."""
        try:
            async with asyncio.timeout(self.call_limit_s):
                return [await self.engine.call(method, *args)]
        except TimeoutError as error:
            raise EngineError(f"it has not ended {method} within {self.call_limit_s:g} s") from error
