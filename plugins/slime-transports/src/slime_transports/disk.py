"""The transport `disk`: safetensors in the run's folder, which servers load."""

from __future__ import annotations

import secrets
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import torch

from slime_core.contracts.transport import SenderSetup, SentReport
from slime_core.errors import EngineError
from slime_training.host_memory import HostMemory
from slime_transports import folder
from slime_transports.config import SentConfig
from slime_transports.folder import FileEntry, Manifest
from slime_transports.folder_sender import FolderSender
from slime_transports.loading import load_from_disk, servers_that_verify
from slime_transports.sender import Layers, WeightUpdate
from slime_transports.servers import receiver_of

WRITERS: Final = 4
"""Number of buckets that are hashed and written at the same time, while the next one is gathered."""


class DiskSender(FolderSender):
    """Writes `RUN/weights/VERSION-IDENTITY/`, another folder each time that a version is sent. The previous version is removed
    when every engine has the new one, so the disk must have space for two."""

    def __init__(self, config: SentConfig) -> None:
        super().__init__(config)
        self._memory: list[HostMemory] = []

    def setup(self, setup: SenderSetup) -> None:
        super().setup(setup)
        if setup.rank == 0:
            self._memory = [HostMemory(torch.device(setup.device)) for _ in range(WRITERS + 1)]

    def send_version(self, layers: Layers, update: WeightUpdate) -> SentReport:
        if self._root is None:
            return SentReport()
        version, engines = update.version, update.engines
        identity, crc32 = secrets.token_hex(8), any(receiver_of(engine).zlib for engine in engines)
        beside = folder.begin(self._root / f"{version}-{identity}")
        entries: list[FileEntry] = []
        writing: deque[Future[FileEntry]] = deque()
        try:
            with ThreadPoolExecutor(WRITERS) as writers:
                for bucket in self.buckets(layers):
                    if len(writing) == WRITERS:
                        entries.append(writing.popleft().result())
                    # Only the last `WRITERS` buckets are still read.
                    host = bucket.on_host(self._memory[bucket.index % len(self._memory)])
                    update.digest(host)
                    writing.append(writers.submit(folder.write_whole, beside, host, crc32=crc32))
                entries += [entry.result() for entry in writing]
            if not entries:
                raise EngineError(f"the trainer exported no weights for version {version}.")
            manifest = Manifest(version=version, identity=identity, buckets=tuple(entries))
            written = folder.finish(beside, manifest)
        finally:
            folder.clear(beside)
        if len(servers_that_verify(self.servers, engines)) < len(engines):
            try:
                folder.verify_whole(written, manifest)
            except folder.DamagedWeights as error:
                raise EngineError(
                    f"engines {[engine.index for engine in engines]} were not updated: {error}."
                ) from error
        try:
            self.after_write(written, engines)
            load_from_disk(self.servers, engines, written, version, compares=update.compares)
        finally:
            self.clear_old(version, [written])
        return SentReport(bytes_sent=sum(entry.nbytes for entry in entries), buckets=len(entries))

    def close(self) -> None:
        super().close()
        self._memory.clear()
