"""Board: the prompts that wait for an answer from outside, and who has them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from slime_core.contracts.generator import Episode
from slime_core.types.sample import Sample

REMEMBERED: Final = 65536
"""Names of tickets that have ended, for messages."""


class Full(Exception):
    """Agents hold as many prompts as they may."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One answer that is asked for."""

    name: str
    """The one under which it was given out last."""
    episode: Episode
    answer: asyncio.Future[Sample]
    room: int
    """Tokens that the response may still have."""
    kept: Sample | None
    """What a partial rollout left; the answer goes on from there."""
    versions: dict[str, int] = field(default_factory=dict)
    """Of the policy when it was given out, by the name that it then had: a new one if the policy had changed since."""
    taken_at: float | None = None
    """None: it waits on the board."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class Board:
    """In order of arrival. All calls are made in one event loop."""

    def __init__(self, *, lease_s: float, max_leased: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._max_leased = max_leased
        self._clock = clock
        self._open: dict[str, Ticket] = {}
        self._waiting: deque[Ticket] = deque()
        self._leased: OrderedDict[str, Ticket] = OrderedDict()
        """The one that was taken first comes first."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._came = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def post(self, name: str, episode: Episode, *, room: int, kept: Sample | None) -> Ticket:
        """A name that is on the board already gets a number behind it (evaluation sets count their answers from 0 each)."""
        loop = asyncio.get_running_loop()
        ticket = Ticket(name="", episode=episode, answer=loop.create_future(), room=room, kept=kept)
        self._name(ticket, name)
        self._waiting.append(ticket)
        self._came.set()
        return ticket

    async def take(self, count: int, wait_s: float) -> list[Ticket]:
        """At most `count`, after at most `wait_s` seconds maybe none. Full if agents hold too many."""
        deadline = self._clock() + wait_s
        while True:
            self._release_late()
            room = self._max_leased - len(self._leased)
            if room <= 0:
                raise Full
            if self._waiting:
                return [self._lease(self._waiting.popleft()) for _ in range(min(count, room, len(self._waiting)))]
            left = deadline - self._clock()
            if left <= 0:
                return []
            self._came.clear()
            # Woken a few times a second too: leases run out without a word.
            try:
                await asyncio.wait_for(self._came.wait(), min(left, 0.25))
            except TimeoutError:
                continue

    def find(self, name: str) -> Ticket | None:
        return self._open.get(name)

    def why_ended(self, name: str) -> str | None:
        """None: there never was one of this name, or it is long ago."""
        return self._ended.get(name)

    def end(self, ticket: Ticket, reason: str) -> None:
        """Nobody can answer it any more. Ending it twice does nothing."""
        if self._open.get(ticket.name) is not ticket:
            return
        self._leased.pop(ticket.name, None)
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        for name in {ticket.name, *ticket.versions}:
            del self._open[name]
            self._ended[name] = reason
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self._came.set()

    def _name(self, ticket: Ticket, name: str) -> None:
        number, free = 1, name
        while free in self._open:
            number, free = number + 1, f"{name}.{number + 1}"
        ticket.name = free
        self._open[free] = ticket
        self._ended.pop(free, None)

    def _lease(self, ticket: Ticket) -> Ticket:
        version = ticket.episode.versions[-1]
        if ticket.versions.get(ticket.name, version) != version:
            # Whoever had it before may answer yet, with the policy of then.
            self._name(ticket, next(iter(ticket.versions)))
        ticket.versions[ticket.name] = version
        ticket.taken_at = self._clock()
        ticket.taken.set()
        self._leased[ticket.name] = ticket
        return ticket

    def _release_late(self) -> None:
        now = self._clock()
        while self._leased:
            ticket = next(iter(self._leased.values()))
            assert ticket.taken_at is not None
            if now - ticket.taken_at < self._lease_s:
                return
            self._leased.popitem(last=False)
            self._waiting.append(ticket)
