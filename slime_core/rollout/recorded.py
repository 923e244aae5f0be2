"""The order in which a pool heard of things, written down; or, in a replay, kept to.

What a pool does follows from what it hears and in which order: of steps that are wanted and of groups that have ended. When it
gives everything back, which groups had ended, or waited for their rewards alone, matters too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class NewsKind(StrEnum):
    STEP = "step"
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
