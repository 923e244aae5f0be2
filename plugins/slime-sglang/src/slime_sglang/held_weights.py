"""SglangWeights: the weights that SGLang's servers hold."""

from __future__ import annotations

import asyncio

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_core.types.weights import Bucket
from slime_serving.held_weights import HeldWeights
from slime_sglang.buckets import SglangBuckets, payload, update_body
from slime_sglang.config import SglangOptions
from slime_sglang.connection import SglangConnection
from slime_sglang.features import Features
from slime_sglang.server.checksum import ACTION
from slime_sglang.server_group import SglangServers


class SglangWeights(HeldWeights):
    """`features`: capabilities that all servers have."""

    _fleet: SglangServers

    def __init__(self, fleet: SglangServers, config: SglangOptions, setup: EngineSetup, features: Features) -> None:
        engine = f"engine {setup.index}"
        order = SglangBuckets(setup.model_path, engine)
        super().__init__(fleet, order, engine, drops_prefixes=config.pause_mode == "abort")
        self._features = features
        # Servers that the engine started are on its machine. A server responds when its first pipeline stage has read the
        # shared memory, so with several stages the bytes are sent in the request.
        self._shared = not config.external_engine_addrs and features.pp_size == 1

    async def send(self, bucket: Bucket) -> None:
        await asyncio.gather(*(self._send_to(server, bucket) for server in self._fleet.servers))

    async def _send_to(self, server: SglangConnection, bucket: Bucket) -> None:
        with payload(bucket, shared=self._shared) as text:
            body = update_body(
                [text] * self._features.tp_size,
                version=bucket.version,
                last=bucket.last,
                other_draft=self._features.other_draft,
            )
            await self._fleet.post_to(server, "/update_weights_from_tensor", body)

    async def checksum(self) -> str:
        """Checksum of the tensors in the servers' memory, under their Hugging Face names. Raises EngineError for servers that
        slime did not start, for several devices per server, and for quantized weights."""
        responses = await self._fleet.post("/weights_checker", {"action": ACTION})
        sums = {str(response["ranks"][0]["per_gpu_checksum"]) for response in responses}
        if len(sums) > 1:
            raise EngineError(f"{self._name}: its servers have different weights: checksums {', '.join(sorted(sums))}.")
        return sums.pop()
