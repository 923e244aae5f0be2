"""StoredWeights: weights for sampling that a session has written, and engines that serve them.

A folder has the tensors as a weight update sends them: NUMBER.safetensors for each bucket, from 00000, and weights.json,
which is written last, with the number of buckets.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slime_core.atomic_io.atomic_file import write_text
from slime_core.atomic_io.storage import storage_error
from slime_core.contracts.transport import EngineGroup, TrainerLink, WeightTransport
from slime_core.errors import CheckpointError, EngineError
from slime_core.types.report import WeightUpdateReport
from slime_core.types.weights import Bucket
from slime_core.workers.buckets import make_bucket
from slime_training.bucket_tensors import tensors_of
from slime_training.replaced_folder import replaced_folder

BUCKET_BYTES: Final = 2**29
"""Of tensors in a file, or one larger tensor."""
INDEX: Final = "weights.json"


class StoredWeights(WeightTransport):
    """In place of the run's transport, so that engines which are restarted get these weights too."""

    def __init__(self, folder: Path) -> None:
        """CheckpointError for a folder that `write_weights` has not completed."""
        try:
            self._number = int(json.loads((folder / INDEX).read_text())["buckets"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder}: not a complete folder of weights for sampling: {error}.") from None
        self.folder = folder

    async def push(self, trainers: TrainerLink, engines: EngineGroup, version: int) -> WeightUpdateReport:
        """The trainers take no part."""
        started, sent = time.perf_counter(), 0
        for index in range(self._number):
            bucket = await asyncio.to_thread(self._bucket, index, version)
            await engines.call_all("load_bucket", bucket)
            sent += bucket.data.nbytes
        held = await engines.call_all("version")
        if wrong := [has for has in held if has != version]:
            raise EngineError(f"{self.folder}: an engine has version {wrong[0]} after these weights, not {version}.")
        seconds = time.perf_counter() - started
        return WeightUpdateReport(version=version, seconds=seconds, bytes_sent=sent, buckets=self._number)

    def _bucket(self, index: int, version: int) -> Bucket:
        file = bucket_file(self.folder, index)
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}.") from error
        return make_bucket(list(tensors.items()), version=version, index=index, last=index == self._number - 1)


async def write_weights(trainers: TrainerLink, folder: Path) -> None:
    """What a weight update would send. A folder that is there is replaced at the end. All ranks of the trainers take part."""
    number = 0
    try:
        with replaced_folder(folder) as aside:
            async for item in trainers.stream_weights(0, BUCKET_BYTES):
                # Under Ray a reference, which is fetched here.
                bucket: Bucket = await item if inspect.isawaitable(item) else item
                await asyncio.to_thread(save_file, dict(tensors_of(bucket)), bucket_file(aside, number))
                number += 1
            write_text(aside / INDEX, json.dumps({"buckets": number}))
    except (OSError, SafetensorError) as error:
        raise storage_error(folder, error) from error


def bucket_file(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.safetensors"
