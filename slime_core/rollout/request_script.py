"""RequestScript: which requests reached an engine, and which one, in a run that is repeated."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence


class RequestScript:
    """In a replay: which requests reached an engine, and which one, from each checkpoint to the next.

    What was broken off for a checkpoint had reached an engine or had not, however fast its generator is now: the former is
    waited for before anything is broken off, the latter stays behind.
    """

    def __init__(self, parts: Iterable[Mapping[str, Sequence[int]]] = ()) -> None:
        """`parts`: of each checkpoint, the engines that a request of this id went to, each time that it was made."""
        self._parts = deque({name: deque(engines) for name, engines in part.items()} for part in parts)
        self._moved = asyncio.Event()

    def engine_of(self, request_id: str) -> int | None:
        """Where it goes now; None: nowhere before the next checkpoint."""
        engines = self._parts[0].get(request_id) if self._parts else None
        return engines[0] if engines else None

    @property
    def goes_on(self) -> bool:
        """Not all has happened that is written down."""
        return bool(self._parts)

    def sent(self, request_id: str) -> None:
        """To the engine that was named."""
        part = self._parts[0]
        part[request_id].popleft()
        if not part[request_id]:
            del part[request_id]
        self._moved.set()

    async def settled(self) -> None:
        """Returns when what reached an engine before the next checkpoint has been sent; at once, outside a replay."""
        while self._parts and self._parts[0]:
            self._moved.clear()
            await self._moved.wait()

    def next_part(self) -> None:
        """A checkpoint has been written."""
        if self._parts:
            self._parts.popleft()
