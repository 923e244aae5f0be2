"""Writes a model folder while weights are gathered: no rank holds more of them than one file, and an incomplete folder has no
config.json."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slime_core.atomic_io.storage import storage_error
from slime_training.collective_errors import raise_on_all_ranks
from slime_training.weight_files import gather_weights

SHARD_BYTES: Final = 5 * 10**9
"""Bytes of tensors in one file, transformers' default; a larger tensor has a file of its own."""
ASIDE: Final = ".weights.writing"
"""Subfolder for files without a final name, which contains the number of files."""
CONFIG: Final = "config.json"
OF_WEIGHTS: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def write_model(
    weights: Iterable[tuple[str, Tensor]],
    target: Path,
    *,
    describe: Callable[[], None],
    group: dist.ProcessGroup | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """All n ranks of `group` call it (None: one rank), with the same whole tensors in the same order; each copies and writes
    every n-th file. `target`: a folder that all of them see; its old weights are replaced. `describe` is called on the first
    rank when all weights are in place, and writes config.json last. Raises StorageError on every rank if one of them could not
    write."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    aside = target / ASIDE

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)

    def look() -> None:
        if not aside.is_dir():
            raise FileNotFoundError(
                f"rank {rank} does not see {ASIDE}, which the first one has made there: all machines must share this folder"
            )

    def end() -> None:
        if rank == 0:
            place(aside, target, shards.ended)
            describe()

    try:
        raise_on_all_ranks(begin, group, ranks)
        raise_on_all_ranks(look, group, ranks)
        with ThreadPoolExecutor(1) as writer:
            shards = Shards(aside, rank=rank, ranks=ranks, shard_bytes=shard_bytes, writer=writer)
            for name, tensor in weights:
                shards.add(name, tensor)
            raise_on_all_ranks(shards.close, group, ranks)
        raise_on_all_ranks(end, group, ranks)
    except (OSError, SafetensorError) as error:
        # Checks the free space before the written files are deleted.
        refused = storage_error(target, error)
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise refused from error


class Shards:
    """Distributes tensors over files, in the order in which they come. This rank holds at most the tensors of one of its own
    files: it continues while that file is written, and waits where its next file begins."""

    def __init__(self, folder: Path, *, rank: int, ranks: int, shard_bytes: int, writer: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._rank = rank
        self._ranks = ranks
        self._shard_bytes = shard_bytes
        self._writer = writer
        self.ended = 0
        """Number of complete files of all ranks."""
        self._size: int | None = None
        """Bytes in the file that is being filled, on any rank; None: it is empty."""
        self._held: dict[str, Tensor] = {}
        self._writing: Future[None] | None = None
        self._failure: OSError | SafetensorError | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Does not raise a failed write, since the other ranks are waiting in the next gather. `close` raises it."""
        if self._size is not None and self._size + tensor.nbytes > self._shard_bytes:
            self._end()
        self._size = (self._size or 0) + tensor.nbytes
        if self.ended % self._ranks != self._rank:
            return
        self._wait()
        if self._failure is None:
            # A copy: a tensor may be a view of a larger one, or a trained weight.
            self._held[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Returns when this rank's files are written; raises the error of a failed write."""
        if self._size is not None:
            self._end()
        self._wait()
        if self._failure is not None:
            raise self._failure

    def _end(self) -> None:
        if self._held:
            held, self._held = self._held, {}
            self._writing = self._writer.submit(write_shard, shard_file(self._folder, self.ended), held)
        self.ended += 1
        self._size = None

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except (OSError, SafetensorError) as error:
            self._failure = error


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


def write_shard(file: Path, tensors: dict[str, Tensor]) -> None:
    """Empties `tensors`, also if it fails: an exception keeps what its frames hold."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    finally:
        tensors.clear()


def place(aside: Path, target: Path, count: int) -> None:
    """Renames the files to the names that transformers expects, and replaces the old ones."""
    parts = [shard_file(aside, number) for number in range(count)]
    (target / CONFIG).unlink(missing_ok=True)
    for file in sorted(target.iterdir(), reverse=True):
        if OF_WEIGHTS.fullmatch(file.name):
            file.unlink()
    if count == 1:
        parts[0].rename(target / "model.safetensors")
    else:
        gather_weights(parts, target)
    aside.rmdir()
