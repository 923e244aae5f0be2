"""SglangReceiver: how SGLang's servers take weights from a trainer's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from slime_core.errors import EngineError
from slime_serving.connection import Connection
from slime_serving.shared_bytes import SharedBytes
from slime_sglang.buckets import mapped, serialized, tensor_metadata, update_body
from slime_sglang.connection import SglangConnection
from slime_sglang.features import has_other_draft
from slime_sglang.server.loading import CAN_VERIFY
from slime_sglang.server.shard_actions import DIGESTS, OF_DRAFTS, PARTS, REFUSED, SKIPPED
from slime_transports.device_handle import DeviceHandle
from slime_transports.flattened_bucket import FlattenedBucket
from slime_transports.places import Place
from slime_transports.receiver import GroupPlace, Refused, WeightReceiver
from slime_transports.server_shards import ServerShards

CHECK: Final = "/weights_checker"
OWN_ACTION: Final = "checksum"
"""SGLang's own checksum of each rank's tensors as they are stored."""


class SglangReceiver(WeightReceiver):
    connection: ClassVar[type[Connection]] = SglangConnection

    def __init__(self, server: Connection, num_ranks: int, timeout_s: float) -> None:
        super().__init__(server, num_ranks, timeout_s)
        self._other_draft: bool | None = None
        """None: not read yet."""

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        response = await self.server.post(path, body, timeout_s=self.timeout_s)
        if not isinstance(response, dict) or response.get("success") is not True:
            raise Refused(f"{self.server.name}: POST {path}: the response is {response!r:.300}.")
        return response

    async def begin(self) -> None:
        """Reads once whether the server has another draft, before any weights are sent."""
        if self._other_draft is not None:
            return
        response = await self.server.get("/server_info", timeout_s=self.timeout_s)
        if not isinstance(response, dict):
            raise EngineError(f"{self.server.name}: GET /server_info: the response is {response!r:.300}.")
        self._other_draft = has_other_draft(response)

    # ---------------------------------------------------------------- files

    async def require_verifies(self) -> None:
        await self._post(CHECK, {"action": CAN_VERIFY})

    async def load_folder(self, folder: Path, version: int) -> None:
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "flush_cache": False,
            "weight_version": str(version),
        }
        await self._post("/update_weights_from_disk", body)

    # ---------------------------------------------------------------- memory

    @staticmethod
    def mapped(memory: SharedBytes, bucket: FlattenedBucket) -> str:
        return serialized(mapped(memory, bucket.data.nbytes), description(bucket))

    @staticmethod
    def opened(handle: DeviceHandle, bucket: FlattenedBucket) -> str:
        """SGLang unpickles it with a list of allowed modules, which includes torch and types."""
        return serialized(partial(handle.rebuild, *handle.arguments), description(bucket))

    async def load_payloads(self, payloads: Sequence[str], bucket: FlattenedBucket, version: int) -> None:
        assert self._other_draft is not None, "begin comes first"
        body = update_body(payloads, version=version, last=bucket.last, other_draft=self._other_draft)
        await self._post("/update_weights_from_tensor", body)

    # ---------------------------------------------------------------- groups

    async def join(self, group: GroupPlace) -> None:
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": group.first_rank,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", body)

    async def take_broadcast(self, group: str, bucket: FlattenedBucket, version: int) -> None:
        body: dict[str, Any] = {
            "names": bucket.names,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        if bucket.last:
            body["weight_version"] = str(version)
        await self._post("/update_weights_from_distributed", body)

    async def leave(self, group: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group})

    # ---------------------------------------------------------------- comparison

    async def shards(self, *, digests: bool) -> ServerShards:
        response = await self._post(CHECK, {"action": DIGESTS if digests else PARTS})
        return shards_in(response, self.server.name)

    async def own_checksums(self) -> tuple[list[str], int]:
        response = await self._post(CHECK, {"action": OWN_ACTION})
        stages = max(rank.get("parallelism_info", {}).get("pp_size", 1) for rank in response["ranks"])
        return [rank["per_gpu_checksum"] for rank in response["ranks"]], stages


def description(bucket: FlattenedBucket) -> list[SimpleNamespace]:
    places = pairwise([0, *bucket.ends])
    tensors = zip(bucket.names, bucket.dtypes, bucket.shapes, places, strict=True)
    return [tensor_metadata(name, dtype, shape, *place) for name, dtype, shape, place in tensors]


def shards_in(response: Mapping[str, Any], server: str) -> ServerShards:
    """Raises EngineError if a rank refuses or is missing."""
    ranks: dict[int, Mapping[Place, str]] = {}
    skipped: tuple[str, ...] = ()
    for given in response["ranks"]:
        checksums: dict[str, str] = dict(given["checksums"])
        rank = int(given["parallelism_info"]["rank"])
        if REFUSED in checksums:
            raise EngineError(f"{server}, rank {rank}: {checksums[REFUSED]}")
        skipped = tuple(checksums.pop(SKIPPED, "").split())
        # With data-parallel attention every group of ranks responds for all ranks.
        ranks[rank] = {Place.parse(key): digest for key, digest in checksums.items() if not key.startswith(OF_DRAFTS)}
    size = int(response["ranks"][0]["parallelism_info"]["size"])
    if sorted(ranks) != list(range(size)):
        raise EngineError(f"{server}: of its {size} ranks only {sorted(ranks)} report the weights they hold.")
    return ServerShards(ranks=ranks, skipped=skipped)
