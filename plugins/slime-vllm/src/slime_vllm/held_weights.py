"""HeldWeights: the weights that an engine's servers hold, sent in buckets, with their version."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from slime_core.contracts.setup import EngineSetup
from slime_core.data.model_folder import read_model_config
from slime_core.errors import EngineError, EngineRefused
from slime_core.types.weights import Bucket
from slime_serving.checked_buckets import CheckedBuckets, layout
from slime_serving.shared_bytes import SharedBytes
from slime_vllm.server_group import VllmServers

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


class HeldWeights:
    """The weights of all servers of a group, which are equal."""

    def __init__(self, fleet: VllmServers, setup: EngineSetup, *, shared: bool) -> None:
        """`shared`: the servers are on this machine, and read buckets from shared memory."""
        self._fleet = fleet
        self._name = f"engine {setup.index}"
        self._order = CheckedBuckets(setup.model_path, self._name)
        self._shared = shared
        config = read_model_config(setup.model_path)
        text = config.get("text_config", config)
        self._tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        self._updating = False
        """An update was started on the servers and not finished."""
        self.given = -1
        """The version that this run sent last; -1: none."""

    @property
    def incomplete(self) -> bool:
        return self._order.incomplete

    def expect(self) -> None:
        self._order.incomplete = True

    async def load(self, bucket: Bucket) -> None:
        """See `CheckedBuckets.check`."""
        self._order.check(bucket)
        self._order.incomplete = True
        if bucket.index == 0:
            if self._updating:
                # The one before was not sent to its end: vLLM refuses to start another one.
                await self._fleet.post("/finish_weight_update", {})
            await self._fleet.post("/start_weight_update", {})
            self._updating = True
        with self._update_of(bucket) as update:
            await self._fleet.post("/update_weights", {"update_info": update})
        if bucket.last:
            await self._fleet.post("/finish_weight_update", {"weight_version": str(bucket.version)})
            self._updating = False
        self._order.loaded(bucket)
        if bucket.last:
            await self.complete(bucket.version)

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
        if self._tied and HEAD not in bucket.names:
            # vLLM's head is another parameter, and would keep its old values.
            rows += [(HEAD, dtype, shape, start) for name, dtype, shape, start in rows if name == EMBEDDING]
        names, dtypes, shapes, starts = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
        update = {"names": names, "dtypes": dtypes, "shapes": shapes, "starts": starts, "size": size}
        with contextlib.ExitStack() as stack:
            if self._shared:
                memory = SharedBytes(data.data)
                stack.callback(memory.close)
                yield update | {"path": memory.path}
            else:
                yield update | {"data": base64.b64encode(data.data).decode()}

    async def complete(self, version: int) -> None:
        """Called when all of a version is loaded and its number is set. Raises EngineError if a server has another version."""
        self._order.incomplete = False
        self.given = version
        # Prefixes computed with the old weights.
        held, _ = await asyncio.gather(self._fleet.versions(), self._fleet.post("/reset_prefix_cache", {}))
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
        raise EngineRefused(
            f"{self._name}: vLLM rearranges weights for its kernels, so they have no checksum under their Hugging Face names. "
            "Omit --check-weight-update-equal."
        )
