"""VllmWeights: the weights that vLLM's servers hold."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineRefused
from slime_core.types.weights import Bucket
from slime_serving.checked_buckets import CheckedBuckets, layout
from slime_serving.held_weights import HeldWeights
from slime_serving.shared_bytes import SharedBytes
from slime_vllm.server_group import VllmServers


class VllmWeights(HeldWeights):
    def __init__(self, fleet: VllmServers, setup: EngineSetup, *, shared: bool) -> None:
        """`shared`: the servers are on this machine, and read buckets from shared memory."""
        engine = f"engine {setup.index}"
        super().__init__(fleet, CheckedBuckets(setup.model_path, engine), engine)
        self._shared = shared

    async def send(self, bucket: Bucket) -> None:
        if bucket.index == 0:
            await self._fleet.post("/collective_rpc", {"method": "begin_weight_update"})
        with self._update_of(bucket) as update:
            await self._fleet.post("/update_weights", {"update_info": update})
        if bucket.last:
            await self._fleet.post("/finish_weight_update", {"weight_version": str(bucket.version)})

    @contextlib.contextmanager
    def _update_of(self, bucket: Bucket) -> Iterator[dict[str, Any]]:
        """Yields vLLM's update info; servers on this machine map its bytes while the context is open."""
        places, size = layout(bucket)
        data = np.zeros(size, np.uint8)
        offset = 0
        for start, end in places:
            data[start:end] = bucket.data[offset : offset + end - start]
            offset += end - start
        rows = [
            (name, dtype, list(shape), start)
            for name, dtype, shape, (start, _) in zip(bucket.names, bucket.dtypes, bucket.shapes, places, strict=True)
        ]
        names, dtypes, shapes, starts = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
        update = {"names": names, "dtypes": dtypes, "shapes": shapes, "starts": starts, "size": size}
        with contextlib.ExitStack() as stack:
            if self._shared:
                memory = SharedBytes(data.data)
                stack.callback(memory.close)
                yield update | {"path": memory.path}
            else:
                yield update | {"data": base64.b64encode(data.data).decode()}

    async def checksum(self) -> str:
        raise EngineRefused(
            f"{self._name}: vLLM rearranges weights for its kernels, so they have no checksum under their Hugging Face names. "
            "With --check-weight-update-equal set --transport ipc, distributed, disk or delta: they send weights twice, and "
            "servers compare them."
        )
