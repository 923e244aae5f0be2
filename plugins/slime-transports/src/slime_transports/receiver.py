"""WeightReceiver: how the servers of one program take weights from a trainer's ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError
from slime_serving.connection import Connection
from slime_serving.shared_bytes import SharedBytes
from slime_transports.device_handle import DeviceHandle
from slime_transports.flattened_bucket import FlattenedBucket
from slime_transports.server_shards import ServerShards


class Refused(EngineError):
    """The server is alive, and has refused the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A process group of the trainer's first rank, rank 0, and all ranks of all servers."""

    name: str
    address: str
    port: int
    backend: str
    """`gloo` or `nccl`."""
    size: int
    first_rank: int
    """Of this server."""


class WeightReceiver(ABC):
    """Calls of one server. Every method raises EngineError if there is no response, and `Refused` if the server refuses; the
    caller adds what was sent. The class travels to the trainer's ranks with each endpoint.

    No method flushes a cache: engines do so in `commit_weights`.
    """

    connection: ClassVar[type[Connection]]
    loads_parts: ClassVar[bool] = True
    """Servers keep tensors that an update leaves out. False: every update has all tensors."""
    compares_sent: ClassVar[bool] = False
    """How servers are compared with the trainer. True: they get a version a second time, and compare it with what they hold
    (`begin_comparison`, `compare_folder`). False: by digests of the parts that they hold (`shards`)."""
    zlib: ClassVar[bool] = False
    """Servers decompress deltas by zlib and check files by CRC-32, which Python itself has: else by zstd and xxh3-64."""

    def __init__(self, server: Connection, num_ranks: int, timeout_s: float) -> None:
        self.server = server
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s

    async def begin(self) -> None:
        """Called on each server before the first bucket of a version, except by transports that write files."""

    # ---------------------------------------------------------------- files

    @abstractmethod
    async def require_verifies(self) -> None:
        """Raises `Refused` unless the server checks every file before it loads any, and applies deltas."""

    @abstractmethod
    async def load_folder(self, folder: Path, version: int) -> None:
        """Loads a folder (`slime_transports.folder`), which makes `version` the server's. After a refusal the server holds what
        it held before; the message of a delta to other weights contains `folder.WRONG_BASE`."""

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Loads a folder (`slime_transports.folder`) with a LoRA adapter in peft's format over the adapter that the server has,
        and makes `version` the server's. Of a damaged folder nothing is loaded."""
        raise Refused(f"{self.server.name}: slime does not send adapters to {self.server.dialect.program}.")

    # ---------------------------------------------------------------- memory

    @staticmethod
    @abstractmethod
    def mapped(memory: SharedBytes, bucket: FlattenedBucket) -> str:
        """How the server's ranks map a bucket in shared memory of this machine."""

    @staticmethod
    @abstractmethod
    def opened(handle: DeviceHandle, bucket: FlattenedBucket) -> str:
        """How a rank of the server opens a bucket in the memory of its device."""

    @abstractmethod
    async def load_payloads(self, payloads: Sequence[str], bucket: FlattenedBucket, version: int) -> None:
        """Loads a bucket. `payloads`: from `mapped` or `opened`, one for each of the server's ranks, in order. The last bucket
        makes `version` the server's. The memory is not read after the response."""

    # ---------------------------------------------------------------- groups

    @abstractmethod
    async def join(self, group: GroupPlace) -> None: ...

    @abstractmethod
    async def take_broadcast(self, group: str, bucket: FlattenedBucket, version: int) -> None:
        """All ranks of the server receive the bucket from rank 0 and load it; the last one makes `version` the server's."""

    @abstractmethod
    async def leave(self, group: str) -> None: ...

    # ---------------------------------------------------------------- comparison

    async def shards(self, *, digests: bool) -> ServerShards:
        """The parts of tensors that each rank holds."""
        raise Refused(f"{self.server.name}: {self.server.dialect.program} cannot name the parts that it holds.")

    async def begin_comparison(self) -> None:
        """In place of `begin`: the buckets that follow are a version that the server has. It loads nothing of them, and refuses
        one of them, at the latest the last, if it holds anything else or if something that it holds was not sent; the message
        names the tensor and both values."""
        raise Refused(f"{self.server.name}: {self.server.dialect.program} cannot compare weights with what it holds.")

    async def compare_folder(self, folder: Path, version: int) -> None:
        """In place of `load_folder`, in the same way."""
        raise Refused(f"{self.server.name}: {self.server.dialect.program} cannot compare weights with what it holds.")

    async def own_checksums(self) -> tuple[list[str], int]:
        """The program's own checksum of each rank, comparable between servers of one layout, and how many pipeline stages
        there are."""
        raise Refused(f"{self.server.name}: {self.server.dialect.program} has no checksum of its weights.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEndpoint(EngineEndpoint):
    receiver: type[WeightReceiver]
