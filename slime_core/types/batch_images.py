"""BatchImages: the images of a batch, each held once however many samples see it.

S samples, U distinct images, K places of images in the samples' prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchImages:
    """Distinct images are numbered in the order in which samples first see them. Arrays may be read-only views."""

    data: npt.NDArray[np.uint8]
    """The encoded images, one after the other."""
    offsets: npt.NDArray[np.int64]
    """(U + 1,) into `data`."""
    which: npt.NDArray[np.int32]
    """(K,) the image at each place, sample after sample."""
    counts: npt.NDArray[np.int32]
    """(S,) places of each sample."""

    @classmethod
    def of(cls, images_of_samples: Sequence[Sequence[bytes]]) -> BatchImages | None:
        """None if no sample has an image."""
        distinct: dict[bytes, int] = {}
        which = [distinct.setdefault(data, len(distinct)) for images in images_of_samples for data in images]
        if not distinct:
            return None
        return cls(
            data=np.frombuffer(b"".join(distinct), np.uint8),
            offsets=np.cumsum([0, *map(len, distinct)], dtype=np.int64),
            which=np.array(which, np.int32),
            counts=np.array([len(images) for images in images_of_samples], np.int32),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def encoded(self, number: int) -> bytes:
        """The bytes of a distinct image."""
        return self.data[self.offsets[number] : self.offsets[number + 1]].tobytes()

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """(S + 1,) into `which`."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def of_sample(self, sample: int) -> npt.NDArray[np.int32]:
        """Its images, in the order of their places."""
        return self.which[self.starts[sample] : self.starts[sample + 1]]

    def take(self, samples: npt.NDArray[np.integer]) -> BatchImages | None:
        """The images of these samples, in this order; None if they have none."""
        encoded: dict[int, bytes] = {}
        for sample in samples:
            for number in self.of_sample(int(sample)).tolist():
                encoded.setdefault(number, self.encoded(number))
        return BatchImages.of([[encoded[number] for number in self.of_sample(int(s)).tolist()] for s in samples])
