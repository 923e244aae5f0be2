"""The order in which a pool heard of things, written down; or, in a replay, kept to. And which requests reached an engine.

What a pool does follows from what it hears and in which order: of steps that have begun, of the one that is next, and of groups
that have ended. When it gives everything back, which groups had ended, or waited for their rewards alone, matters too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class NewsKind(StrEnum):
    STEP = "step"
    TAKE = "take"
    """A step is the next to be trained."""
    GROUP = "group"
    GIVE_BACK = "give_back"


class News(NamedTuple):
    kind: NewsKind
    number: int = -1
    """Of the step, or the group's index."""
    ended: tuple[int, ...] = ()
    """Groups that had ended by themselves when everything was given back."""
    generated: tuple[int, ...] = ()
    """Those that waited for their rewards."""


class PoolRecord:
    """`script`: what is to be heard, in this order; when it has ended, anything is."""

    def __init__(self, script: Iterable[News] = ()) -> None:
        self.heard: list[News] = []
        """Since it was last written to the schedule."""
        self._script = deque(script)
        self._moved = asyncio.Event()

    @property
    def expected(self) -> News | None:
        """What must be heard next."""
        return self._script[0] if self._script else None

    def note(self, news: News) -> None:
        self.heard.append(news)
        if self._script and (self._script[0].kind, self._script[0].number) == (news.kind, news.number):
            self._script.popleft()
        self._moved.set()

    async def settled(self) -> None:
        """Returns when nothing is to be heard before everything is given back; at once, outside a replay."""
        while self._script and self._script[0].kind is not NewsKind.GIVE_BACK:
            self._moved.clear()
            await self._moved.wait()


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
