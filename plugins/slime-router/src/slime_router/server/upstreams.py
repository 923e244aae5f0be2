"""Upstreams: the engines, or routers in front of engines, that requests are sent to."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from yarl import URL

from slime_core.errors import ConfigError
from slime_router.server.settings import Settings

MAX_MISSED: Final = 3


@dataclass(slots=True, eq=False)
class Upstream:
    """One upstream. Middlewares identify it by its number, which is never reused."""

    number: int
    url: str
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    up: bool = True
    missed: int = 0
    """Consecutive probes without a response in time."""
    in_flight: int = 0
    sent: int = 0
    failed: int = 0


class Upstreams:
    """Upstreams, which can be added and removed at run time. One that cannot be reached, or misses `MAX_MISSED` probes, is
    down until a probe succeeds."""

    def __init__(self, urls: Sequence[str], settings: Settings) -> None:
        self._settings = settings
        self._numbers = itertools.count()
        self._by_number: dict[int, Upstream] = {}
        self._turn = 0
        for url in urls:
            self.add(url, where="--upstream")

    def __iter__(self) -> itertools.chain[Upstream]:
        return itertools.chain(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, url: str, *, where: str = "url") -> Upstream:
        """The upstream of that address, created if it does not exist. Raises ConfigError if `url` is not an address.
        `where`: the key or flag for the message."""
        url = checked(url, where)
        for upstream in self:
            if upstream.url == url:
                return upstream
        number = next(self._numbers)
        upstream = self._by_number[number] = Upstream(number, url)
        return upstream

    def find(self, upstream_id: str) -> Upstream | None:
        return next((upstream for upstream in self if upstream.id == upstream_id), None)

    def remove(self, upstream: Upstream) -> None:
        """Sends no new requests there; running requests continue."""
        self._by_number.pop(upstream.number, None)

    def in_turn(self) -> tuple[int, ...]:
        """Numbers of the upstreams that are up, each call beginning with the next one (round robin)."""
        up = tuple(upstream.number for upstream in self if upstream.up)
        self._turn += 1
        cut = self._turn % len(up) if up else 0
        return up[cut:] + up[:cut]

    def choose(self, numbers: Sequence[int]) -> Upstream | None:
        """The first of `numbers` that exists and is up."""
        for number in numbers:
            upstream = self._by_number.get(number)
            if upstream is not None and upstream.up:
                return upstream
        return None

    async def probe_for_ever(self, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.gather(*(self.probe(upstream, session) for upstream in self))
            await asyncio.sleep(self._settings.health_interval_s)

    async def probe(self, upstream: Upstream, session: aiohttp.ClientSession) -> None:
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        try:
            async with session.get(f"{upstream.url}/health", timeout=timeout) as response:
                upstream.up, upstream.missed = response.status < 500, 0
        except TimeoutError:
            # A busy upstream is slow too. Marking it down at once would move its load to the others.
            upstream.missed += 1
            upstream.up = upstream.up and upstream.missed < MAX_MISSED
        except aiohttp.ClientError:
            upstream.up = False


def checked(url: str, where: str) -> str:
    try:
        parsed = URL(url)
    except ValueError:
        parsed = URL()
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query_string or parsed.fragment:
        raise ConfigError(f'{where} "{url}": not an address; one looks like http://127.0.0.1:30000.')
    return str(parsed).rstrip("/")
