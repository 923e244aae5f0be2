"""HeldWeights: the weights that an engine's servers hold, sent in buckets, with their version."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from slime_core.errors import EngineError
from slime_core.types.weights import Bucket
from slime_serving.checked_buckets import CheckedBuckets
from slime_serving.server_group import ServerGroup


class HeldWeights(ABC):
    """The weights of all servers of a group, which are equal. A subclass sends a bucket in its program's form."""

    def __init__(
        self, fleet: ServerGroup[Any], order: CheckedBuckets, engine: str, *, drops_prefixes: bool = True
    ) -> None:
        """`drops_prefixes`: prefixes computed with the old weights are flushed when the new ones are complete."""
        self._fleet = fleet
        self._order = order
        self._name = engine
        self._drops_prefixes = drops_prefixes
        self.given = -1
        """The version that this run sent last; -1: none."""

    @property
    def incomplete(self) -> bool:
        """Whether a version is partly loaded."""
        return self._order.incomplete

    def expect(self) -> None:
        """Marks the version as incomplete, because a transport is about to send one."""
        self._order.incomplete = True

    async def load(self, bucket: Bucket) -> None:
        """See `CheckedBuckets.check`."""
        self._order.check(bucket)
        self._order.incomplete = True
        await self.send(bucket)
        self._order.loaded(bucket)
        if bucket.last:
            await self.complete(bucket.version)

    @abstractmethod
    async def send(self, bucket: Bucket) -> None:
        """Loads a bucket into all servers; with the last one, sets the version."""

    async def complete(self, version: int) -> None:
        """Called when all of a version is loaded and its number is set. Raises EngineError if a server has another version."""
        # Until the end: if this fails, or is cancelled, prefixes of the old weights may be left.
        self._order.incomplete = True
        flushes = [self._fleet.flush()] if self._drops_prefixes else []
        _, held = await asyncio.gather(asyncio.gather(*flushes), self._fleet.versions())
        if set(held) != {version}:
            raise EngineError(f"{self._name}: version {version} was loaded, but its servers report {held}.")
        self.given = version
        self._order.incomplete = False

    async def version(self) -> int:
        """The version that the servers report. Raises EngineError if they differ, or if this run did not send that version."""
        held = await self._fleet.versions()
        if len(set(held)) > 1:
            raise EngineError(f"{self._name}: its servers have different versions: {held}.")
        if self.given >= 0 and held[0] != self.given and not self._order.incomplete:
            raise EngineError(f"{self._name}: it was sent version {self.given}, but its servers report {held[0]}.")
        return held[0]

    @abstractmethod
    async def checksum(self) -> str:
        """See `RolloutEngine.checksum`."""
