"""Place: a part of a tensor of the model's files that a rank of a server holds, in the form that servers and trainer send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Indices `start` to `start + length` of dimension `dim` of the tensor `name`, with all its other dimensions."""

    name: str
    """Name in the model's files."""
    dim: int
    start: int
    length: int
    dtype: str
    """Dtype in the server, such as `bfloat16`. Loaded weights are converted to it."""

    def __str__(self) -> str:
        return f"{self.name} {self.dim} {self.start} {self.length} {self.dtype}"

    @classmethod
    def parse(cls, text: str) -> Self:
        name, dim, start, length, dtype = text.split(" ")
        return cls(name=name, dim=int(dim), start=int(start), length=int(length), dtype=dtype)
