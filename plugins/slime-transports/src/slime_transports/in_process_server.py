"""InProcessServer: a server of this process that holds no model, for tests. Its receiver shows what an engine writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError
from slime_core.types.weights import Bucket
from slime_serving.connection import Connection, HttpDialect
from slime_serving.shared_bytes import SharedBytes
from slime_transports.delta_code import BITS, changed, decompress
from slime_transports.device_handle import DeviceHandle
from slime_transports.flattened_bucket import FlattenedBucket, flatten
from slime_transports.folder import WRONG_BASE, DamagedWeights, Manifest, read_manifest, verify_whole
from slime_transports.receiver import GroupPlace, Refused, ServerEndpoint, WeightReceiver

JOINED_S: Final = timedelta(seconds=20)


class InProcessServer:
    """`receive`: called with each bucket as it was sent, with whole tensors."""

    def __init__(self, receive: Callable[[Bucket], None]) -> None:
        self.groups: dict[str, dist.ProcessGroupGloo] = {}
        self._receive = receive
        self._index = 0
        self._held: dict[str, Tensor] = {}
        self.identity: str | None = None
        """Of the weights that it has, if they came as files."""

    def load_folder(self, folder: Path, version: int) -> None:
        manifest = read_manifest(folder)
        if manifest.base is not None and manifest.base != self.identity:
            raise Refused(f"version {manifest.version} is {WRONG_BASE}")
        if manifest.base is None:
            verify_whole(folder, manifest)
        self.identity = None
        for number, entry in enumerate(manifest.buckets):
            if manifest.base is None:
                tensors = load_file(folder / entry.file)
                tensors = {name: tensors[name] for name in entry.names}
            else:
                tensors = self._changed(folder, manifest, number)
            self._held.update(tensors)
            self.take(tensors, version if number == len(manifest.buckets) - 1 else None)
        self.identity = manifest.identity

    def _changed(self, folder: Path, manifest: Manifest, number: int) -> dict[str, Tensor]:
        entry = manifest.buckets[number]
        content = (folder / entry.file).read_bytes()
        if xxhash.xxh3_64_hexdigest(content) != entry.checksum:
            raise DamagedWeights(f"bucket {number} is damaged")
        bucket = flatten([(name, self._held[name]) for name in entry.names], index=0, last=False)
        for width, start, end, positions, values in changed(
            decompress(content, entry.parts), bucket.dtypes, bucket.ends, bucket.data.device
        ):
            bucket.data[start:end].view(BITS[width])[positions] = values
        return dict(bucket.tensors())

    def join(self, place: GroupPlace) -> None:
        store: dist.Store = dist.TCPStore(place.address, place.port, timeout=JOINED_S)
        for prefix in (place.name, f"{place.name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self.groups[place.name] = dist.ProcessGroupGloo(store, place.first_rank, place.size, JOINED_S)

    def take_broadcast(self, group: str, like: FlattenedBucket, version: int | None) -> None:
        bucket = flatten([(name, torch.zeros_like(tensor)) for name, tensor in like.tensors()], index=0, last=False)
        self.groups[group].broadcast([bucket.data], dist.BroadcastOptions()).wait()
        self.take(dict(bucket.tensors()), version)

    def take(self, tensors: Mapping[str, Tensor], version: int | None) -> None:
        """`version`: only with the last bucket."""
        bucket = flatten(list(tensors.items()), index=self._index, last=version is not None)
        data = bucket.data.numpy()
        index, self._index = self._index, 0 if bucket.last else self._index + 1
        self._receive(
            Bucket(
                version=-1 if version is None else version,
                index=index,
                last=bucket.last,
                names=bucket.names,
                dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in bucket.dtypes),
                shapes=bucket.shapes,
                data=data,
                checksum=xxhash.xxh3_64_hexdigest(data.data),
            )
        )


class InProcessConnection(Connection):
    dialect: ClassVar[HttpDialect] = HttpDialect(program="a server of this process", generate="")


class InProcessReceiver(WeightReceiver):
    connection: ClassVar[type[Connection]] = InProcessConnection
    servers: ClassVar[dict[str, InProcessServer]] = {}
    """By URL."""

    async def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            await asyncio.to_thread(function, *arguments)
        except (EngineError, DamagedWeights) as error:
            raise Refused(f"{self.server.name}: {error}") from error

    @property
    def _server(self) -> InProcessServer:
        found = self.servers.get(self.server.address)
        if found is None:
            raise EngineError(f"{self.server.name}: no server responds there.")
        return found

    async def require_verifies(self) -> None:
        """It does."""

    async def load_folder(self, folder: Path, version: int) -> None:
        await self._run(self._server.load_folder, folder, version)

    async def load_adapter(self, folder: Path, version: int) -> None:
        await self.load_folder(folder, version)

    @staticmethod
    def mapped(memory: SharedBytes, bucket: FlattenedBucket) -> str:
        return json.dumps({"path": memory.path, "size": bucket.data.nbytes})

    @staticmethod
    def opened(handle: DeviceHandle, bucket: FlattenedBucket) -> str:
        raise EngineError("a server of this process has no device.")

    async def load_payloads(self, payloads: Sequence[str], bucket: FlattenedBucket, version: int) -> None:
        place = json.loads(payloads[0])

        def load() -> None:
            flat = torch.from_file(place["path"], shared=True, size=place["size"], dtype=torch.uint8).clone()
            tensors = zip(bucket.names, bucket.dtypes, bucket.shapes, [0, *bucket.ends], bucket.ends, strict=False)
            named = {name: flat[start:end].view(dtype).view(shape) for name, dtype, shape, start, end in tensors}
            self._server.take(named, version if bucket.last else None)

        await self._run(load)

    async def join(self, group: GroupPlace) -> None:
        await self._run(self._server.join, group)

    async def take_broadcast(self, group: str, bucket: FlattenedBucket, version: int) -> None:
        await self._run(self._server.take_broadcast, group, bucket, version if bucket.last else None)

    async def leave(self, group: str) -> None:
        self._server.groups.pop(group, None)


endpoint: Callable[..., EngineEndpoint] = partial(ServerEndpoint, receiver=InProcessReceiver)


@contextmanager
def serve(receive: Callable[[Bucket], None]) -> Iterator[str]:
    """Yields the URL of a server, at which nothing listens."""
    server = InProcessServer(receive)
    url = f"http://127.0.0.1:1/{id(server)}"
    InProcessReceiver.servers[url] = server
    try:
        yield url
    finally:
        del InProcessReceiver.servers[url]
