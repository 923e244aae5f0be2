"""LoadedFolder: folders of weights of the transports `disk` and `delta`, as a worker reads them.

Imports torch, safetensors and the standard library: checksums are CRC-32, deltas are zlib's.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

MANIFEST: Final = "slime_weights.json"
WRONG_BASE: Final = "a delta to other weights than are held"
"""Both as in slime_transports.folder, which is not in this interpreter."""
READERS: Final = 4


class DamagedFolder(ValueError):
    """The content of the folder is not what was written."""


@dataclass(frozen=True, slots=True)
class HeldBucket:
    """The tensors of a file, one after the other in host memory, as the sender has them."""

    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[Sequence[int]]
    data: Tensor
    """(bytes,) uint8."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> HeldBucket:
        kinds = [tensor.dtype for tensor in tensors.values()]
        shapes = [list(tensor.shape) for tensor in tensors.values()]
        return cls(list(tensors), kinds, shapes, torch.cat([bytes_of(tensor) for tensor in tensors.values()]))

    @property
    def ends(self) -> list[int]:
        ends = [0]
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            ends.append(ends[-1] + dtype.itemsize * torch.Size(shape).numel())
        return ends[1:]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        rows = zip(self.names, self.dtypes, self.shapes, pairwise([0, *self.ends]), strict=True)
        for name, dtype, shape, (start, end) in rows:
            yield name, self.data[start:end].view(dtype).view(shape)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yields (bytes of an element, start, end) of ranges of equal width."""
        start = 0
        for width, run in groupby(zip(self.dtypes, self.ends, strict=True), key=lambda item: item[0].itemsize):
            end = list(run)[-1][1]
            yield width, start, end
            start = end

    def apply(self, changes: Sequence[tuple[bytes, bytes]]) -> None:
        """Writes new values. `changes`, for each run: distances between changed elements, uint32, and their values, both byte
        plane by byte plane."""
        for (width, start, end), (steps, values) in zip(self.runs(), changes, strict=True):
            if not steps:
                continue
            positions = (elements(steps, 4).flatten().view(torch.int32).to(torch.int64) & 0xFFFFFFFF).cumsum(0)
            self.data[start:end].view(-1, width)[positions] = elements(values, width)


class LoadedFolder:
    """What a worker knows about the folder that it loaded last."""

    def __init__(self) -> None:
        self._identity: str | None = None
        """Identity of the weights that the model holds; None: they came in another way."""
        self._held: list[HeldBucket] = []
        """A copy of them on the host, if deltas may follow."""

    def forget(self) -> None:
        self._identity = None
        self._held = []

    def problem(self, folder: Path) -> str:
        """Why the folder cannot be loaded, after reading all of it; empty if it can. Changes nothing."""
        try:
            manifest = read_manifest(folder)
            if manifest["base"] is not None and manifest["base"] != self._identity:
                return f"version {manifest['version']} is {WRONG_BASE}"
            check = verify_whole if manifest["base"] is None else content_of
            with ThreadPoolExecutor(READERS) as readers:
                list(readers.map(partial(check, folder, manifest["version"]), enumerate(manifest["buckets"])))
        except (OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def tensors(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors of the weights that the folder leads to. Call `problem` before."""
        manifest = read_manifest(folder)
        entries = manifest["buckets"]
        if manifest["base"] is not None:
            changes = [parts_of(content_of(folder, manifest["version"], item), item[1]) for item in enumerate(entries)]
            self._identity = None
            for bucket, change in zip(self._held, changes, strict=True):
                bucket.apply(change)
                yield from bucket.tensors()
        else:
            self.forget()
            for entry in entries:
                tensors = tensors_of(folder, entry)
                if manifest["deltas_follow"]:
                    self._held.append(HeldBucket.of(tensors))
                    yield from self._held[-1].tensors()
                else:
                    yield from tensors.items()
        self._identity = manifest["identity"]


def read_manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    return found


def tensors_of(folder: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    with safe_open(folder / entry["file"], framework="pt") as file:
        return {name: file.get_tensor(name) for name in entry["names"]}


def verify_whole(folder: Path, version: int, item: tuple[int, Mapping[str, Any]]) -> None:
    number, entry = item
    where = f"bucket {number} of version {version} ({folder / entry['file']})"
    try:
        tensors = tensors_of(folder, entry)
    except (OSError, SafetensorError) as error:
        raise DamagedFolder(f"{where} cannot be read: {error}") from error
    found = 0
    for tensor in tensors.values():
        found = zlib.crc32(bytes_of(tensor).numpy().data, found)
    require_equal(where, entry, found)


def content_of(folder: Path, version: int, item: tuple[int, Mapping[str, Any]]) -> bytes:
    number, entry = item
    where = f"bucket {number} of version {version} ({folder / entry['file']})"
    try:
        content = (folder / entry["file"]).read_bytes()
    except OSError as error:
        raise DamagedFolder(f"{where} cannot be read: {error}") from error
    require_equal(where, entry, zlib.crc32(content))
    return content


def require_equal(where: str, entry: Mapping[str, Any], found: int) -> None:
    if found != entry["crc32"]:
        raise DamagedFolder(f"{where} is damaged: checksum {entry['crc32']} was written, its bytes have {found}")


def parts_of(content: bytes, entry: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    view, place, found = memoryview(content), 0, []
    for steps, values in entry["parts"]:
        middle, end = place + steps, place + steps + values
        found.append((zlib.decompress(view[place:middle]), zlib.decompress(view[middle:end])))
        place = end
    return found


def elements(planes: bytes, width: int) -> Tensor:
    """(N, width) uint8 from byte planes."""
    return torch.frombuffer(bytearray(planes), dtype=torch.uint8).view(width, -1).T.contiguous()


def bytes_of(tensor: Tensor) -> Tensor:
    """(bytes,) uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8)
