"""VllmReceiver: how vLLM's servers take weights from a trainer's ranks, through the extension of their workers."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from slime_serving.connection import Connection
from slime_serving.shared_bytes import SharedBytes
from slime_transports.device_handle import DeviceHandle
from slime_transports.flattened_bucket import FlattenedBucket
from slime_transports.receiver import GroupPlace, WeightReceiver
from slime_vllm.adapter import LOAD, NAME
from slime_vllm.connection import VllmConnection


class VllmReceiver(WeightReceiver):
    connection: ClassVar[type[Connection]] = VllmConnection
    loads_parts: ClassVar[bool] = False
    compares_sent: ClassVar[bool] = True
    zlib: ClassVar[bool] = True

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await self.server.post(path, body, timeout_s=self.timeout_s)

    async def _ask_workers(self, method: str, **arguments: str | bool) -> None:
        """Raises EngineError if it fails in any worker."""
        await self._post("/collective_rpc", {"method": method, "kwargs": arguments})

    async def begin(self) -> None:
        await self._ask_workers("begin_weight_update")

    async def begin_comparison(self) -> None:
        await self._ask_workers("begin_weight_update", compares=True)

    async def _update(self, info: dict[str, Any], version: int | None) -> None:
        """`version`: the update is complete."""
        await self._post("/update_weights", {"update_info": info})
        if version is not None:
            await self._post("/finish_weight_update", {"weight_version": str(version)})

    # ---------------------------------------------------------------- files

    async def require_verifies(self) -> None:
        await self._ask_workers("require_loadable", folder="")

    async def load_folder(self, folder: Path, version: int) -> None:
        """All workers read the whole folder before one of them loads any of it."""
        await self._ask_workers("require_loadable", folder=str(folder))
        await self.begin()
        await self._update({"folder": str(folder)}, version)

    async def load_adapter(self, folder: Path, version: int) -> None:
        """All workers read the folder before one of them loads it. The route is for the first one: it makes the name known."""
        path = str(folder.absolute())
        await self._ask_workers("require_loadable", folder=path)
        served = await self.server.get("/v1/models", timeout_s=self.timeout_s)
        if NAME not in {row["id"] for row in served["data"]}:
            await self._post(LOAD, {"lora_name": NAME, "lora_path": path})
        await self._ask_workers("load_adapter", folder=path)
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def compare_folder(self, folder: Path, version: int) -> None:
        await self._ask_workers("require_loadable", folder=str(folder))
        await self.begin_comparison()
        await self._update({"folder": str(folder)}, version)

    # ---------------------------------------------------------------- memory

    @staticmethod
    def mapped(memory: SharedBytes, bucket: FlattenedBucket) -> str:
        return json.dumps({"path": memory.path, "size": max(bucket.data.nbytes, 1)})

    @staticmethod
    def opened(handle: DeviceHandle, bucket: FlattenedBucket) -> str:
        """The arguments of torch's `rebuild_cuda_tensor` that differ from bucket to bucket, as JSON."""
        given = handle.arguments
        return json.dumps(
            {
                "size": bucket.data.nbytes,
                "offset": given[3],
                "device": given[6],
                "handle": base64.b64encode(given[7]).decode(),
                "storage_size": given[8],
                "storage_offset": given[9],
                "counter": base64.b64encode(given[11]).decode(),
                "counter_offset": given[12],
                "event": base64.b64encode(given[13]).decode(),
                "event_sync": given[14],
            }
        )

    async def load_payloads(self, payloads: Sequence[str], bucket: FlattenedBucket, version: int) -> None:
        await self._update(description(bucket) | {"payloads": list(payloads)}, version if bucket.last else None)

    # ---------------------------------------------------------------- groups

    async def join(self, group: GroupPlace) -> None:
        await self._post("/init_weight_transfer_engine", {"init_info": {"join": asdict(group)}})

    async def take_broadcast(self, group: str, bucket: FlattenedBucket, version: int) -> None:
        await self._update(description(bucket) | {"group": group}, version if bucket.last else None)

    async def leave(self, group: str) -> None:
        await self._post("/init_weight_transfer_engine", {"init_info": {"leave": group}})


def description(bucket: FlattenedBucket) -> dict[str, Any]:
    """Fields of the worker's `SlimeUpdate`."""
    return {
        "names": bucket.names,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
        "shapes": bucket.shapes,
        "starts": [0, *bucket.ends][: len(bucket.names)],
        "size": bucket.data.nbytes,
    }
