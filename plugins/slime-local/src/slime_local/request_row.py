"""A request on its way through the engine, and the call of `generate` that waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from slime_core.errors import EngineError
from slime_core.types.completion import Completion, FinishReason, GenerateRequest
from slime_core.types.sample import VersionSpan

if TYPE_CHECKING:
    from slime_local.image_inputs import ImageInputs


class Ticket(Protocol):
    """The responses to one call, for the caller that waits for them."""

    def put(self, place: int, completion: Completion) -> None: ...

    def fail(self, error: EngineError) -> None: ...


class StreamTicket:
    """The responses in the order in which they end."""

    def __init__(self) -> None:
        self._ended: asyncio.Queue[Completion | EngineError] = asyncio.Queue()

    async def next(self) -> Completion:
        ended = await self._ended.get()
        if isinstance(ended, EngineError):
            raise ended
        return ended

    def put(self, place: int, completion: Completion) -> None:
        self._ended.put_nowait(completion)

    def fail(self, error: EngineError) -> None:
        self._ended.put_nowait(error)


class ListTicket:
    """The responses in the order of the requests; `future` is done when the last one is set."""

    def __init__(self, size: int) -> None:
        self.future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._completions: list[Completion | None] = [None] * size
        self._missing = size

    def put(self, place: int, completion: Completion) -> None:
        self._completions[place] = completion
        self._missing -= 1
        if not self._missing and not self.future.done():
            self.future.set_result([completion for completion in self._completions if completion is not None])

    def fail(self, error: EngineError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class RequestRow:
    request: GenerateRequest
    ticket: Ticket
    place: int
    """Index of the response in the ticket."""
    limit: int
    """New tokens at most."""
    pictures: ImageInputs | None = None
    start: int = 0
    """Column of the prompt's first token, once admitted."""
    shared_tokens: int = 0
    """Prompt tokens whose keys and values another row of the same admission computed."""
    stale: bool = False
    """Keys and values were computed by other weights."""
    version: int = -1
    """Version of the weights that generate the current span."""
    span_start: int = 0
    """Column where the current span starts."""
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def longest(self) -> int:
        """Tokens of prompt and response that it may reach."""
        return self.prompt_length + self.limit

    @property
    def response_start(self) -> int:
        return self.start + self.prompt_length

    def close_span(self, end: int, version: int) -> None:
        """Tokens up to column `end` belong to the weights so far, later ones to `version`."""
        if end > self.span_start:
            first = self.response_start
            self.spans.append(VersionSpan(self.version, self.span_start - first, end - first))
        self.version, self.span_start = version, end

    def respond(
        self,
        tokens: npt.NDArray[np.int32],
        log_probs: npt.NDArray[np.float32],
        reason: FinishReason,
        engine_index: int,
    ) -> None:
        self.ticket.put(
            self.place,
            Completion(
                request_id=self.request.request_id,
                token_ids=tokens,
                log_probs=log_probs,
                finish_reason=reason,
                spans=tuple(self.spans),
                cached_tokens=self.shared_tokens,
                engine_index=engine_index,
            ),
        )
