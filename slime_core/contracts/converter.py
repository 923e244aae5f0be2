"""Converter: a model folder of one format to one of another, piece by piece, for `slime convert`.

Calling order: `pieces`; then `write` for each of them, in any order and in several processes; then `finish`, once; then
`read_back` for each piece. The kernel keeps count of what is done, so that a conversion that was killed goes on.
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
"""Name of a tensor to the checksum of its bytes, type and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one process converts at a time: small enough for its memory."""

    name: str
    """Of the piece's folder: letters, digits, dots, dashes, underscores."""
    num_bytes: int
    """About how much is read; for the progress bar."""


class Converter(ABC):
    """Built in every process that takes part. What `write` makes depends on the source and the options alone."""

    @abstractmethod
    def pieces(self, source: Path) -> Sequence[Piece]:
        """Looks at `source` without reading its weights. Raises ModelError if it cannot be converted."""

    @abstractmethod
    def write(self, source: Path, piece: Piece, folder: Path) -> Checksums:
        """Writes this piece into `folder`, which is its own and empty; returns the checksums of what was written, computed
        from memory."""

    @abstractmethod
    def finish(self, source: Path, folders: Mapping[str, Path], target: Path) -> None:
        """Puts the pieces (by name, each in its folder) and whatever concerns the whole into `target`. It may be called
        again after it was interrupted: files that it has moved already are then found in `target`."""

    @abstractmethod
    def read_back(self, source: Path, piece: Piece, target: Path) -> Checksums:
        """Of the same tensors, as `target` holds them on disk."""


class TensorFormat(ABC):
    """Makes of trained tensors what a converted folder would hold of them, on their way to engines that started from one."""

    @abstractmethod
    def names(self, name: str) -> Sequence[str]:
        """What the folder has in place of the tensor of this name; the name alone where the tensor is as it was."""

    @abstractmethod
    def converted(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole tensors by name, on any device, where the results are too. What stays as it is may be the same object."""


class ConverterDriver(Driver[Converter]):
    """`build` makes the converter."""

    @classmethod
    def writes(cls, quantization: Mapping[str, Any]) -> bool:
        """Whether `tensor_format` is there for folders whose config.json has this `quantization_config`."""
        return False

    @classmethod
    def tensor_format(cls, folder: Path) -> TensorFormat:
        """That of a folder whose weights it writes. ModelError if the folder is not as such folders are."""
        raise NotImplementedError
