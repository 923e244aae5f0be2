"""The weights that an engine's servers hold: brought bucket by bucket, known by version and checksum."""

from __future__ import annotations

import asyncio

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_core.types.weights import Bucket
from slime_sglang.buckets import BucketOrder, payload, update_body
from slime_sglang.config import SglangOptions
from slime_sglang.connection import Connection
from slime_sglang.features import Features
from slime_sglang.fleet import Fleet
from slime_sglang.server.checksum import ACTION


class HeldWeights:
    """All servers of a fleet hold the same. `features`: what they all can do."""

    def __init__(self, fleet: Fleet, config: SglangOptions, setup: EngineSetup, features: Features) -> None:
        self._fleet = fleet
        self._name = f"engine {setup.index}"
        self._order = BucketOrder(setup.model_path, self._name)
        self._features = features
        # Servers that the engine started are on its machine. One answers when its first pipeline stage has read what is
        # shared, so with several each is sent bytes of its own.
        self._shared = not config.external_engine_addrs and features.pp_size == 1
        # What was computed with the weights before leaves the servers' caches when new ones are complete.
        self._drops_prefixes = config.pause_mode == "abort"
        self.given = -1
        """The version that this run has brought; -1: none."""

    @property
    def incomplete(self) -> bool:
        """Whether a version is partly there."""
        return self._order.incomplete

    def expect(self) -> None:
        """Someone else brings a version: it counts once all of it is there."""
        self._order.incomplete = True

    async def load(self, bucket: Bucket) -> None:
        """See `BucketOrder.check`."""
        self._order.check(bucket)
        self._order.incomplete = True
        await asyncio.gather(*(self._send(server, bucket) for server in self._fleet.servers))
        self._order.loaded(bucket)
        if bucket.last:
            await self.complete(bucket.version)

    async def _send(self, server: Connection, bucket: Bucket) -> None:
        with payload(bucket, shared=self._shared) as text:
            body = update_body(
                [text] * self._features.tp_size,
                version=bucket.version,
                last=bucket.last,
                other_draft=self._features.other_draft,
            )
            await self._fleet.post_to(server, "/update_weights_from_tensor", body)

    async def complete(self, version: int) -> None:
        """All of a version is there, and the servers were told its number. EngineError if a server has another version."""
        self._order.incomplete = False
        self.given = version
        flushes = [self._fleet.flush()] if self._drops_prefixes else []
        held, *_ = await asyncio.gather(self._fleet.versions(), *flushes)
        if set(held) != {version}:
            self._order.incomplete = True
            raise EngineError(f"{self._name}: version {version} was loaded, but its servers say {held}.")

    async def version(self) -> int:
        """As the servers say. EngineError if they differ, or hold what this run has not given them."""
        held = await self._fleet.versions()
        if len(set(held)) > 1:
            raise EngineError(f"{self._name}: its servers have different versions: {held}.")
        if self.given >= 0 and held[0] != self.given and not self._order.incomplete:
            raise EngineError(f"{self._name}: it was given version {self.given}, but its servers say {held[0]}.")
        return held[0]

    async def checksum(self) -> str:
        """Of the tensors as they are in the servers' memory, under their Hugging Face names. EngineError for servers
        that slime did not start, for several devices a server, and for quantised weights."""
        answers = await self._fleet.post("/weights_checker", {"action": ACTION})
        sums = {str(answer["ranks"][0]["per_gpu_checksum"]) for answer in answers}
        if len(sums) > 1:
            raise EngineError(f"{self._name}: its servers have different weights: checksums {', '.join(sorted(sums))}.")
        return sums.pop()
