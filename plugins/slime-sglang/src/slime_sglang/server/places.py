"""Places: which parts of the tensors of a model's files a rank of a server holds, as server and trainer tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

PARTS: Final = "slime_parts"
"""Of /weights_checker: each rank's places, without digests."""
DIGESTS: Final = "slime_part_digests"
"""Of /weights_checker: each rank's places with the digest of what is there."""
REFUSED: Final = "refused"
"""In the place of a place, with the reason: a rank that fails alone would leave the others waiting for its answer."""
SKIPPED: Final = "skipped"
"""In the place of a place, with what names begin with whose tensors the model does not load, one after the other."""
OF_DRAFTS: Final = "draft."
"""Before what SGLang adds of the draft of speculative decoding, whose names are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`length` steps from `start` on in dimension `dim` of the tensor `name`, and all of its other dimensions."""

    name: str
    """As in the model's files."""
    dim: int
    start: int
    length: int
    dtype: str
    """Of what is held: `bfloat16`. What is loaded is converted to it."""

    def __str__(self) -> str:
        return f"{self.name} {self.dim} {self.start} {self.length} {self.dtype}"

    @classmethod
    def parse(cls, text: str) -> Self:
        name, dim, start, length, dtype = text.split(" ")
        return cls(name=name, dim=int(dim), start=int(start), length=int(length), dtype=dtype)
