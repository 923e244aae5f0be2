"""The transport `delta`: compressed changes since the version that an engine has, in the run's folder."""

from __future__ import annotations

import math
import secrets
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Final

import xxhash

from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SentReport
from slime_core.errors import EngineError
from slime_training.host_memory import HostMemory
from slime_transports import folder
from slime_transports.config import DeltaConfig
from slime_transports.delta_code import Planes, compare, compress
from slime_transports.flattened_bucket import FlattenedBucket
from slime_transports.folder import FileEntry, Manifest
from slime_transports.folder_sender import FolderSender
from slime_transports.loading import load_from_disk, servers_that_verify, try_to_load
from slime_transports.sender import Layers, WeightUpdate
from slime_transports.servers import receiver_of

WRITERS: Final = 4
"""Buckets that are compressed and written while the next ones are gathered and compared."""


class DeltaSender(FolderSender):
    """Keeps the weights that it sent last, on the host. An engine that holds other weights, as far as the sender knows or the
    engine reports, is sent all weights. The files stay in `RUN/weights` until the next weight update has ended."""

    # Unchanged tensors cost nothing in a delta, and the base must be whole.
    skips_frozen: ClassVar[bool] = False

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__(config)
        self._level = config.compression_level
        self._zlib = False
        """See `WeightReceiver.zlib`; the same for all engines."""
        self._sent: list[FlattenedBucket] = []
        self._memory: dict[int, HostMemory] = {}
        """Memory of `_sent`, by the bucket's number."""
        self._num_changed = 0
        """Number of changed elements in the last comparison."""
        self._identity: str | None = None
        """Identity of the sent weights; None: nothing was sent, or not all."""
        self._holders: set[EngineEndpoint] = set()

    def send_version(self, layers: Layers, update: WeightUpdate) -> SentReport:
        if self._root is None:
            return SentReport()
        version, engines = update.version, update.engines
        able = servers_that_verify(self.servers, engines)
        unable = [engine for engine in engines if engine not in able]
        if unable:
            raise EngineError(
                f"engine {unable[0].index} ({unable[0].url}) cannot apply deltas: only servers that slime starts can. "
                'Use sync.transport = "distributed" or "disk".'
            )
        self._zlib = any(receiver_of(engine).zlib for engine in engines)
        if update.compares:
            # Sent whole, from the export: neither side's copy is trusted.
            self._identity, self._sent = None, []
        base, identity = self._identity, secrets.token_hex(8)
        self._identity = None
        delta = folder.begin(self._root / f"{version}-from-{base}") if base is not None else None
        written: list[Path] = []
        try:
            changes = self._take(layers, delta, update)
            if not self._sent:
                raise EngineError(f"the trainer exported no weights for version {version}.")
            self._identity = identity
            holders, self._holders = [engine for engine in engines if engine in self._holders], set()
            bytes_sent = 0
            if delta is not None and changes is not None and holders:
                manifest = Manifest(
                    version=version, identity=identity, base=base, buckets=tuple(changes), deltas_follow=True
                )
                written.append(folder.finish(delta, manifest))
                self.after_write(written[-1], holders)
                refused = try_to_load(self.servers, holders, written[-1], version, but=folder.WRONG_BASE)
                self._holders.update(set(holders) - set(refused))
                bytes_sent += sum(entry.nbytes for entry in changes)
            others = [engine for engine in engines if engine not in self._holders]
            if others:
                beside = folder.begin(self._root / f"{version}-{identity}")
                entries = tuple(folder.write_whole(beside, bucket, crc32=self._zlib) for bucket in self._sent)
                written.append(
                    folder.finish(
                        beside, Manifest(version=version, identity=identity, buckets=entries, deltas_follow=True)
                    )
                )
                self.after_write(written[-1], others)
                load_from_disk(self.servers, others, written[-1], version, compares=update.compares)
                bytes_sent += sum(entry.nbytes for entry in entries)
                self._holders.update(others)
        finally:
            self.clear_old(version, written)
        density = None if changes is None else self._num_changed / sum(map(num_elements, self._sent))
        return SentReport(bytes_sent=bytes_sent, buckets=len(self._sent), density=density)

    def _take(self, layers: Layers, delta: Path | None, update: WeightUpdate) -> list[FileEntry] | None:
        """Updates `_sent`, and returns the changes; None if the tensors are not the same ones as the last time."""
        before, self._sent, self._num_changed = self._sent, [], 0
        changes: list[Future[FileEntry]] | None = None if delta is None else []
        with ThreadPoolExecutor(WRITERS) as writers:
            for bucket in self.buckets(layers):
                update.digest(bucket)
                held = before[bucket.index] if bucket.index < len(before) else None
                if delta is None or changes is None or held is None or not alike(held, bucket):
                    changes = None
                    self._sent.append(self._kept(bucket))
                    continue
                if len(changes) >= WRITERS:
                    # Limits the changes that wait in memory to be compressed.
                    changes[-WRITERS].result()
                found = compare(held.data, bucket)
                self._num_changed += sum(steps.shape[-1] for steps, _ in found)
                changes.append(writers.submit(self._write, delta, bucket, found))
                self._sent.append(held)
        entries = None if changes is None else [change.result() for change in changes]
        return entries if len(before) == len(self._sent) else None

    def _kept(self, bucket: FlattenedBucket) -> FlattenedBucket:
        """The bucket on the host, in memory that no other code writes to."""
        # If it is on the host already, `flatten` has copied it.
        return bucket.on_host(self._memory.setdefault(bucket.index, HostMemory(bucket.data.device)))

    def _write(self, delta: Path, bucket: FlattenedBucket, changes: Planes) -> FileEntry:
        content, parts = compress(changes, level=self._level, with_zlib=self._zlib)
        name = f"changes-{bucket.index:05d}.{'zlib' if self._zlib else 'zst'}"
        folder.write_bytes(delta / name, content)
        return FileEntry(
            file=name,
            names=bucket.names,
            checksum=xxhash.xxh3_64_hexdigest(content),
            crc32=zlib.crc32(content) if self._zlib else None,
            nbytes=len(content),
            dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in bucket.dtypes),
            shapes=bucket.shapes,
            parts=tuple(parts),
        )


def alike(held: FlattenedBucket, bucket: FlattenedBucket) -> bool:
    return (held.names, held.dtypes, held.shapes, held.last) == (
        bucket.names,
        bucket.dtypes,
        bucket.shapes,
        bucket.last,
    )


def num_elements(bucket: FlattenedBucket) -> int:
    return sum(math.prod(shape) for shape in bucket.shapes)
