"""Records the order of a pool's events, or replays a recorded order.

What a pool does depends only on the order of its events: steps that begin, the step that is next, and groups that end. When it
flushes its groups to the buffer, it also depends on which groups have ended or only wait for their rewards.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from slime_core.contracts.collector import CollectorEvent


class PoolEventKind(StrEnum):
    STEP = "step"
    TAKE = "take"
    """A step has become the next to be trained."""
    GROUP = "group"
    GIVE_BACK = "give_back"


class PoolEvent(NamedTuple):
    kind: PoolEventKind
    number: int = -1
    """Number of the step, or index of the group."""
    ended: tuple[int, ...] = ()
    """Groups that had ended by themselves when all were flushed to the buffer."""
    generated: tuple[int, ...] = ()
    """Groups that only waited for their rewards."""


class PoolRecord:
    """Records events, or replays them."""

    def __init__(self) -> None:
        self.heard: list[PoolEvent] = []
        """Events since the last `drain_events`."""
        self.script: deque[PoolEvent] = deque()
        """Events that are still to be replayed."""
        self._moved = asyncio.Event()

    def follow(self, script: Iterable[CollectorEvent]) -> None:
        """`script`: events to replay, in this order; after its end, events are taken as they come."""
        for kind, number, ended, generated in script:
            self.script.append(PoolEvent(PoolEventKind(kind), number, tuple(ended), tuple(generated)))

    @property
    def expected(self) -> PoolEvent | None:
        """The next event of a replay, or None."""
        return self.script[0] if self.script else None

    def note(self, news: PoolEvent) -> None:
        self.heard.append(news)
        if self.script and (self.script[0].kind, self.script[0].number) == (news.kind, news.number):
            self.script.popleft()
        self._moved.set()

    async def settled(self) -> None:
        """Returns when no event is left to replay before the next flush to the buffer; at once outside a replay."""
        while self.script and self.script[0].kind is not PoolEventKind.GIVE_BACK:
            self._moved.clear()
            await self._moved.wait()
