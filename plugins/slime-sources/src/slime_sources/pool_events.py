"""The order in which a pool heard of things, written down; or, in a replay, kept to.

What a pool does follows from what it hears and in which order: of steps that have begun, of the one that is next, and of groups
that have ended. When it gives everything back, which groups had ended, or waited for their rewards alone, matters too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from slime_core.contracts.collector import CollectorEvent


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
    """Writes down what is heard."""

    def __init__(self) -> None:
        self.heard: list[News] = []
        """Since it was last asked for."""
        self.script: deque[News] = deque()
        """What is still to be heard."""
        self._moved = asyncio.Event()

    def follow(self, script: Iterable[CollectorEvent]) -> None:
        """`script`: what is to be heard, in this order; when it has ended, anything is."""
        for kind, number, ended, generated in script:
            self.script.append(News(NewsKind(kind), number, tuple(ended), tuple(generated)))

    @property
    def expected(self) -> News | None:
        """What must be heard next."""
        return self.script[0] if self.script else None

    def note(self, news: News) -> None:
        self.heard.append(news)
        if self.script and (self.script[0].kind, self.script[0].number) == (news.kind, news.number):
            self.script.popleft()
        self._moved.set()

    async def settled(self) -> None:
        """Returns when nothing is to be heard before everything is given back; at once, outside a replay."""
        while self.script and self.script[0].kind is not NewsKind.GIVE_BACK:
            self._moved.clear()
            await self._moved.wait()
