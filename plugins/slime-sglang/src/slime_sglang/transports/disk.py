"""The transport `disk`: safetensors below the run's folder, loaded by /update_weights_from_disk."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SenderSetup, SentReport
from slime_core.errors import EngineError
from slime_sglang.transports import folder
from slime_sglang.transports.equality import Digests
from slime_sglang.transports.flat import flat_buckets
from slime_sglang.transports.folder import FileEntry, Manifest
from slime_sglang.transports.loading import load_from_disk, servers_that_verify
from slime_sglang.transports.sender import ServerSender
from slime_training.host_memory import HostMemory

if TYPE_CHECKING:
    from torch import Tensor

WRITERS: Final = 4
"""Buckets that are hashed and written at the same time, while the next one is gathered."""


class DiskSender(ServerSender):
    """`RUN/weights/VERSION/`. The version before is removed when every engine has the new one: there must be room for
    two. None is left at the end."""

    _root: Path | None = None

    def setup(self, setup: SenderSetup) -> None:
        super().setup(setup)
        if setup.rank == 0:
            self._memory = [HostMemory(torch.device(setup.device)) for _ in range(WRITERS + 1)]
            self._root = setup.run_dir / "weights"
            # What an attempt before this one left is of other weights.
            folder.clear_all_but(self._root, [])

    def bring(
        self,
        layers: Iterator[Mapping[str, Tensor] | None],
        version: int,
        engines: Sequence[EngineEndpoint],
        digests: Digests | None,
    ) -> SentReport:
        if self._root is None:
            return SentReport()
        beside = folder.begin(self._root / str(version))
        entries: list[FileEntry] = []
        writing: deque[Future[FileEntry]] = deque()
        try:
            with ThreadPoolExecutor(WRITERS) as writers:
                for bucket in flat_buckets(layers, self._config.update_weight_buffer_size):
                    if bucket is None:
                        continue
                    if len(writing) == WRITERS:
                        entries.append(writing.popleft().result())
                    # Only the last ones are still read.
                    host = bucket.on_host(self._memory[bucket.index % len(self._memory)])
                    if digests is not None:
                        digests.add(host)
                    writing.append(writers.submit(folder.write_whole, beside, host))
                entries += [entry.result() for entry in writing]
            if not entries:
                raise EngineError(f"the trainer exported no weights for version {version}.")
            manifest = Manifest(version=version, identity=secrets.token_hex(8), buckets=tuple(entries))
            written = folder.finish(beside, manifest)
        finally:
            folder.clear(beside)
        if len(servers_that_verify(self.servers, engines)) < len(engines):
            try:
                folder.verify_whole(written, manifest)
            except folder.DamagedWeights as error:
                raise EngineError(f"engines {[engine.index for engine in engines]} were not told: {error}.") from error
        load_from_disk(self.servers, engines, written, version)
        folder.clear_all_but(self._root, [written])
        return SentReport(bytes_sent=sum(entry.nbytes for entry in entries), buckets=len(entries))

    def close(self) -> None:
        super().close()
        if self._root is not None:
            # Engines have what they read in memory, and an attempt after this one brings its own.
            folder.clear(self._root)
            self._root = None
            self._memory.clear()
