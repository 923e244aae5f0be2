"""RequestReplay: the engine of each request, in a run that repeats a recorded one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence


class RequestReplay:
    """The engines that requests were sent to, from each checkpoint to the next.

    A request that a checkpoint interrupted had been sent to an engine or not, however fast its generator is now: requests
    that had been sent are waited for before the interruption, the others are not sent.
    """

    def __init__(self, parts: Iterable[Mapping[str, Sequence[int]]] = ()) -> None:
        """`parts`: for each checkpoint, the engines of each request id, one per time that it was sent."""
        self._parts = deque({name: deque(engines) for name, engines in part.items()} for part in parts)
        self._moved = asyncio.Event()

    def engine_of(self, request_id: str) -> int | None:
        """Engine to send it to now; None: it is not sent before the next checkpoint."""
        engines = self._parts[0].get(request_id) if self._parts else None
        return engines[0] if engines else None

    @property
    def active(self) -> bool:
        """True until all recorded requests were sent and all checkpoints written."""
        return bool(self._parts)

    def sent(self, request_id: str) -> None:
        """Records that the request was sent to that engine."""
        part = self._parts[0]
        part[request_id].popleft()
        if not part[request_id]:
            del part[request_id]
        self._moved.set()

    async def settled(self) -> None:
        """Waits until all requests recorded before the next checkpoint were sent; returns at once outside a replay."""
        while self._parts and self._parts[0]:
            self._moved.clear()
            await self._moved.wait()

    def next_part(self) -> None:
        """Call it after a checkpoint was written."""
        if self._parts:
            self._parts.popleft()
