"""BatchImages: the images of a batch, each held once: S samples, U distinct images, K of all samples, P places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from slime_core.types.image import Image


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchImages:
    """Distinct images are numbered in the order of their first use. Arrays may be read-only views."""

    data: npt.NDArray[np.uint8]
    """The encoded images, one after the other."""
    offsets: npt.NDArray[np.int64]
    """(U + 1,) into `data`."""
    which: npt.NDArray[np.int32]
    """(K,) number of the distinct image, sample after sample."""
    counts: npt.NDArray[np.int32]
    """(S,) images of each sample."""
    places: npt.NDArray[np.int32]
    """(P,) `Image.places`, one image after the other."""
    place_counts: npt.NDArray[np.int32]
    """(K,) places of each; 0: its features are at the image tokens of the prompt."""
    frames: npt.NDArray[np.int32]
    """(U,) `Image.frames` of each distinct image."""

    @classmethod
    def of(cls, images_of_samples: Sequence[Sequence[Image]]) -> BatchImages | None:
        """None if no sample has an image."""
        every = [image for images in images_of_samples for image in images]
        distinct = {image.data: image for image in every}
        if not distinct:
            return None
        numbers = {data: number for number, data in enumerate(distinct)}
        return cls(
            data=np.frombuffer(b"".join(distinct), np.uint8),
            offsets=np.cumsum([0, *map(len, distinct)], dtype=np.int64),
            which=np.array([numbers[image.data] for image in every], np.int32),
            counts=np.array([len(images) for images in images_of_samples], np.int32),
            places=np.array([place for image in every for place in image.places], np.int32),
            place_counts=np.array([len(image.places) for image in every], np.int32),
            frames=np.array([image.frames for image in distinct.values()], np.int32),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def encoded(self, number: int) -> bytes:
        """Encoded bytes of a distinct image."""
        return self.data[self.offsets[number] : self.offsets[number + 1]].tobytes()

    def image(self, number: int, places: tuple[int, ...] = ()) -> Image:
        """A distinct image, at these places."""
        return Image(data=self.encoded(number), places=places, frames=int(self.frames[number]))

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """(S + 1,) into `which`."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def of_sample(self, sample: int) -> npt.NDArray[np.int32]:
        """Numbers of the sample's images, in the order of their places."""
        return self.which[self.starts[sample] : self.starts[sample + 1]]

    @cached_property
    def place_starts(self) -> npt.NDArray[np.int64]:
        """(K + 1,) into `places`."""
        return np.concatenate([[0], np.cumsum(self.place_counts, dtype=np.int64)])

    def places_of(self, sample: int) -> list[tuple[int, ...]]:
        """`Image.places` of each image of the sample."""
        rows = range(int(self.starts[sample]), int(self.starts[sample + 1]))
        return [tuple(self.places[self.place_starts[k] : self.place_starts[k + 1]].tolist()) for k in rows]

    def take(self, samples: npt.NDArray[np.integer]) -> BatchImages | None:
        """The images of these samples, in this order; None if they have none."""
        image = cache(self.image)

        def images(sample: int) -> list[Image]:
            placed = zip(self.of_sample(sample).tolist(), self.places_of(sample), strict=True)
            return [replace(image(number), places=places) for number, places in placed]

        return BatchImages.of([images(int(sample)) for sample in samples])
