"""Converter: converts a model folder to another format, piece by piece, for `slime convert`.

Calling order: `pieces`; then `write` for each of them, in any order and in several processes; then `finish`, once; then
`read_back` for each piece. The kernel records finished pieces, so a conversion that was killed can continue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from torch import Tensor

Checksums = Mapping[str, str]
"""Tensor name to the checksum of its bytes, dtype and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of the model that one process converts at a time: small enough for its memory."""

    name: str
    """Name of the piece's folder: letters, digits, dots, dashes, underscores."""
    num_bytes: int
    """Approximate bytes to read, for the progress bar."""


class Converter(ABC):
    """Built in every converting process. The output of `write` depends only on the source and the options."""

    @abstractmethod
    def pieces(self, source: Path) -> Sequence[Shard]:
        """Divides the folder `source` into pieces without reading weights. Raises ModelError if it cannot be converted."""

    @abstractmethod
    def write(self, source: Path, piece: Shard, folder: Path) -> Checksums:
        """Converts `piece` of the model folder `source` into `folder`, which is empty and used by this piece alone. Returns the
        checksums of the written tensors, computed from memory."""

    @abstractmethod
    def finish(self, source: Path, folders: Mapping[str, Path], target: Path) -> None:
        """Moves the pieces into `target` and writes the files of the whole model, such as the index. folders: each piece's
        folder, by `Shard.name`. May be called again after an interruption: files already moved are then in `target`."""

    @abstractmethod
    def read_back(self, source: Path, piece: Shard, target: Path) -> Checksums:
        """Reads the tensors of `piece` from the finished `target`; returns checksums to compare with those of `write`."""


class TensorFormat(ABC):
    """Converts trained tensors to the format of a converted folder, for weight updates of engines that loaded such a folder."""

    @abstractmethod
    def names(self, name: str) -> Sequence[str]:
        """Names that replace the tensor `name` in the folder; only `name` itself if the tensor is unchanged."""

    @abstractmethod
    def converted(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Converts whole tensors by name; results are on the same device. Unchanged tensors may be the same objects."""


class ConverterDriver(Driver[Converter]):
    """Chosen by `slime convert`; `build` returns the converter."""

    @classmethod
    def writes(cls, quantization: Mapping[str, Any]) -> bool:
        """True if `tensor_format` supports folders whose config.json has this `quantization_config`."""
        return False

    @classmethod
    def tensor_format(cls, folder: Path) -> TensorFormat:
        """Format of a folder that this converter wrote. Raises ModelError if the folder is not of that format."""
        raise NotImplementedError
