"""TimedEngine: a rollout engine without a model that takes as long as one with a model would, on the clock of its loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slime_core.contracts.engine import Capability, EngineInfo, MemoryTag, RolloutEngine
from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import Completion, FinishReason, GenerateRequest
from slime_core.types.sample import VersionSpan
from slime_core.types.weights import Bucket

ROUNDING = 1e-6


@dataclass(slots=True, eq=False)
class Row:
    """A request, waiting for a slot or in one."""

    request: GenerateRequest
    ended: asyncio.Queue[Completion]
    length: int
    """Tokens of the response if it is not aborted."""
    reason: FinishReason
    begun: float = 0.0
    """The engine's count of tokens per slot when it got its slot."""
    runs: bool = False
    gone: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, first token) of its spans."""

    def written(self, count: float) -> int:
        return min(self.length, int(count - self.begun + ROUNDING)) if self.runs else 0


class TimedEngine(RolloutEngine):
    """`slots` requests are decoded at once, each at `rate(running)` tokens per second; the others wait in order. A
    token follows from the seed and its position, so a request that continues differs from one that begins.

    `length(request)`: tokens of the whole response; of a request that continues one, the remaining tokens.
    """

    def __init__(
        self, *, slots: int, rate: Callable[[int], float], length: Callable[[GenerateRequest], int], version: int = 0
    ) -> None:
        self.tokens_written = 0
        """In all, those of aborted requests included."""
        self.most_running = 0
        self._slots = slots
        self._rate = rate
        self._length = length
        self._version = version
        self._waiting: deque[Row] = deque()
        self._running: dict[str, Row] = {}
        self._ends: list[tuple[float, int, Row]] = []
        self._order = itertools.count()
        self._count = 0.0
        """Tokens that a slot which was always taken would have written."""
        self._at = 0.0
        self._paused = False
        self._alarm: asyncio.TimerHandle | None = None

    async def start(self, setup: EngineSetup) -> EngineInfo:
        return EngineInfo(capabilities=frozenset({Capability.VERSION_SPANS}))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        found = {completion.request_id: completion async for completion in self.stream(requests)}
        return [found[request.request_id] for request in requests]

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Completion, None]:
        ended: asyncio.Queue[Completion] = asyncio.Queue()
        rows = [self._row(request, ended) for request in requests]
        self._pass_time()
        self._waiting.extend(rows)
        self._advance()
        try:
            for _ in requests:
                yield await ended.get()
        finally:
            self._end([row for row in rows if not row.gone], FinishReason.ABORT)

    def _row(self, request: GenerateRequest, ended: asyncio.Queue[Completion]) -> Row:
        length, budget = self._length(request), request.sampling.max_new_tokens
        reason = FinishReason.STOP if length <= budget else FinishReason.LENGTH
        return Row(request, ended, min(length, budget), reason)

    # ---------------------------------------------------------------- time

    def _pass_time(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._running and not self._paused:
            self._count += (now - self._at) * self._rate(len(self._running))
        self._at = now

    def _advance(self) -> None:
        """Fills the slots, returns ended responses, and sets the alarm for the next end. Call `_pass_time` first."""
        done = []
        while self._ends and (self._ends[0][2].gone or self._ends[0][0] <= self._count + ROUNDING):
            _, _, row = heapq.heappop(self._ends)
            if not row.gone:
                done.append(row)
        for row in done:
            self._end([row], row.reason)
        while self._waiting and len(self._running) < self._slots and not self._paused:
            row = self._waiting.popleft()
            row.begun, row.runs = self._count, True
            row.versions.append((self._version, 0))
            self._running[row.request.request_id] = row
            heapq.heappush(self._ends, (row.begun + row.length, next(self._order), row))
        self.most_running = max(self.most_running, len(self._running))
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._ends and not self._paused:
            left = (self._ends[0][0] - self._count) / self._rate(len(self._running))
            self._alarm = asyncio.get_running_loop().call_later(max(left, 0.0), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._pass_time()
        self._advance()

    def _end(self, rows: Iterable[Row], reason: FinishReason) -> None:
        for row in rows:
            row.gone = True
            length = row.written(self._count) if reason is FinishReason.ABORT else row.length
            if row.runs:
                del self._running[row.request.request_id]
            else:
                self._waiting.remove(row)
            self.tokens_written += length
            row.ended.put_nowait(self._completion(row, length, reason))

    def _completion(self, row: Row, length: int, reason: FinishReason) -> Completion:
        ends = [first for _, first in row.versions[1:]] + [length] * bool(row.versions)
        first = len(row.request.token_ids)
        return Completion(
            request_id=row.request.request_id,
            token_ids=((row.request.seed + np.arange(first, first + length)) % 97 + 2).astype(np.int32),
            log_probs=np.full(length, -0.5, np.float32),
            finish_reason=reason,
            spans=tuple(
                VersionSpan(version, start, min(end, length))
                for (version, start), end in zip(row.versions, ends, strict=True)
                if start < min(end, length)
            ),
        )

    # ---------------------------------------------------------------- the rest of the contract

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._pass_time()
        rows = [*self._running.values(), *self._waiting]
        chosen = None if request_ids is None else set(request_ids)
        self._end([row for row in rows if chosen is None or row.request.request_id in chosen], FinishReason.ABORT)
        self._advance()

    async def pause(self) -> None:
        self._pass_time()
        self._paused = True
        self._advance()

    async def resume(self) -> None:
        self._pass_time()
        self._paused = False
        self._advance()

    async def load_bucket(self, bucket: Bucket) -> None:
        if bucket.last:
            await self.commit_weights(bucket.version)

    async def commit_weights(self, version: int) -> None:
        self._pass_time()
        self._version = version
        for row in self._running.values():
            row.versions.append((version, row.written(self._count)))

    async def version(self) -> int:
        return self._version

    async def checksum(self) -> str:
        return str(self._version)

    async def sleep(self, tags: Sequence[MemoryTag] | None = None) -> None: ...

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None: ...

    async def health(self) -> None: ...

    async def stop(self) -> None: ...
