"""HeldWeights: the weights that an engine's servers hold, sent in buckets, with their version and checksum."""

from __future__ import annotations

import asyncio

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_core.types.weights import Bucket
from slime_sglang.buckets import SglangBuckets, payload, update_body
from slime_sglang.config import SglangOptions
from slime_sglang.connection import SglangConnection
from slime_sglang.features import Features
from slime_sglang.server.checksum import ACTION
from slime_sglang.server_group import SglangServers


class HeldWeights:
    """The weights of all servers of a group, which are equal. `features`: capabilities that all of them have."""

    def __init__(self, fleet: SglangServers, config: SglangOptions, setup: EngineSetup, features: Features) -> None:
        self._fleet = fleet
        self._name = f"engine {setup.index}"
        self._order = SglangBuckets(setup.model_path, self._name)
        self._features = features
        # Servers that the engine started are on its machine. A server responds when its first pipeline stage has read the
        # shared memory, so with several stages the bytes are sent in the request.
        self._shared = not config.external_engine_addrs and features.pp_size == 1
        # Prefixes computed with the old weights are flushed when the new ones are complete.
        self._drops_prefixes = config.pause_mode == "abort"
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
        await asyncio.gather(*(self._send(server, bucket) for server in self._fleet.servers))
        self._order.loaded(bucket)
        if bucket.last:
            await self.complete(bucket.version)

    async def _send(self, server: SglangConnection, bucket: Bucket) -> None:
        with payload(bucket, shared=self._shared) as text:
            body = update_body(
                [text] * self._features.tp_size,
                version=bucket.version,
                last=bucket.last,
                other_draft=self._features.other_draft,
            )
            await self._fleet.post_to(server, "/update_weights_from_tensor", body)

    async def complete(self, version: int) -> None:
        """Called when all of a version is loaded and its number is set. Raises EngineError if a server has another version."""
        self._order.incomplete = False
        self.given = version
        flushes = [self._fleet.flush()] if self._drops_prefixes else []
        held, *_ = await asyncio.gather(self._fleet.versions(), *flushes)
        if set(held) != {version}:
            self._order.incomplete = True
            raise EngineError(f"{self._name}: version {version} was loaded, but its servers report {held}.")

    async def version(self) -> int:
        """The version that the servers report. Raises EngineError if they differ, or if this run did not send that version."""
        held = await self._fleet.versions()
        if len(set(held)) > 1:
            raise EngineError(f"{self._name}: its servers have different versions: {held}.")
        if self.given >= 0 and held[0] != self.given and not self._order.incomplete:
            raise EngineError(f"{self._name}: it was sent version {self.given}, but its servers report {held[0]}.")
        return held[0]

    async def checksum(self) -> str:
        """Checksum of the tensors in the servers' memory, under their Hugging Face names. Raises EngineError for servers that
        slime did not start, for several devices per server, and for quantized weights."""
        responses = await self._fleet.post("/weights_checker", {"action": ACTION})
        sums = {str(response["ranks"][0]["per_gpu_checksum"]) for response in responses}
        if len(sums) > 1:
            raise EngineError(f"{self._name}: its servers have different weights: checksums {', '.join(sorted(sums))}.")
        return sums.pop()
