"""LimitedRank: a rank whose calls end in time, so that one that hangs does not block the run for ever."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from slime_core.errors import RankTimeout
from slime_core.registry.call_limit import CallLimit
from slime_core.workers.launcher import RankHandle

ENDED: Final = object()


class LimitedRank:
    """See `RankHandle`. Once a rank of the role has not ended a call in time, all calls to the role raise RankTimeout."""

    def __init__(self, rank: RankHandle, number: int, limit: CallLimit) -> None:
        self._rank = rank
        self._number = number
        self._limit = limit

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        async with self._in_time(method):
            return await self._rank.call(method, *args, **kwargs)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        items = self._rank.stream(method, *args)
        while True:
            async with self._in_time(method):
                item = await anext(items, ENDED)
            if item is ENDED:
                return
            yield item

    @contextlib.asynccontextmanager
    async def _in_time(self, method: str) -> AsyncIterator[None]:
        if self._limit.exceeded is not None:
            raise self._limit.exceeded
        async with self._limit.call(f"rank {self._number} in {method}"):
            yield


def limited(ranks: Sequence[RankHandle], role: str, seconds: float) -> list[RankHandle]:
    """The ranks of a role with one limit, in seconds."""

    def error(calls: Sequence[str]) -> RankTimeout:
        return RankTimeout(
            f"trainer {role}, {' and '.join(dict.fromkeys(calls))} (of {len(ranks)}): not ended within {seconds:g} s. A rank "
            "hangs, or, if its work takes so long, raise --rank-call-timeout."
        )

    limit = CallLimit(seconds, error)
    return [LimitedRank(rank, number, limit) for number, rank in enumerate(ranks)]
