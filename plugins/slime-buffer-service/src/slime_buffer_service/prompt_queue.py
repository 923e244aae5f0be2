"""PromptQueue: prompts that wait for a response from agents, and their leases."""

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
"""Maximum number of ended tickets whose reason is kept for messages."""


class Full(Exception):
    """Agents hold as many prompts as they may."""


@dataclass(slots=True, eq=False)
class Lease:
    """One requested response."""

    name: str
    """The name of the latest lease."""
    episode: Episode
    response: asyncio.Future[Sample]
    room: int
    """Tokens that the response may still have."""
    kept: Sample | None
    """Sample of a partial rollout, which the response continues."""
    versions: dict[str, int] = field(default_factory=dict)
    """Policy version at each lease, by its ticket name. A lease after a change of the policy has a new name."""
    taken_at: float | None = None
    """None: it waits in the queue."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class PromptQueue:
    """A queue in order of arrival. All calls must come from one event loop."""

    def __init__(self, *, lease_s: float, max_leased: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._max_leased = max_leased
        self._clock = clock
        self._open: dict[str, Lease] = {}
        self._waiting: deque[Lease] = deque()
        self._leased: OrderedDict[str, Lease] = OrderedDict()
        """Leases in the order in which they were taken."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._came = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def post(self, name: str, episode: Episode, *, room: int, kept: Sample | None) -> Lease:
        """Adds a prompt. If the name is in use, a number is appended (each evaluation set counts its responses from 0)."""
        loop = asyncio.get_running_loop()
        ticket = Lease(name="", episode=episode, response=loop.create_future(), room=room, kept=kept)
        self._name(ticket, name)
        self._waiting.append(ticket)
        self._came.set()
        return ticket

    async def take(self, count: int, wait_s: float) -> list[Lease]:
        """Leases at most `count` prompts; [] if there are none within `wait_s` seconds. Raises Full if agents hold too many."""
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
            # Also wakes up four times a second, because a lease that ends sets no event.
            try:
                await asyncio.wait_for(self._came.wait(), min(left, 0.25))
            except TimeoutError:
                continue

    def find(self, name: str) -> Lease | None:
        return self._open.get(name)

    def why_ended(self, name: str) -> str | None:
        """The reason why a ticket ended. None: the name is unknown, or too old."""
        return self._ended.get(name)

    def end(self, ticket: Lease, reason: str) -> None:
        """Ends a ticket: responses to it are refused from now on. A second call does nothing."""
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

    def _name(self, ticket: Lease, name: str) -> None:
        number, free = 1, name
        while free in self._open:
            number, free = number + 1, f"{name}.{number + 1}"
        ticket.name = free
        self._open[free] = ticket
        self._ended.pop(free, None)

    def _lease(self, ticket: Lease) -> Lease:
        version = ticket.episode.versions[-1]
        if ticket.versions.get(ticket.name, version) != version:
            # The agent that leased it before may still respond, with the policy of that time.
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
