"""Images of a shard to what a micro-batch carries: pixels of each distinct one, and the feature of each token.

Legend: N packed tokens, T tokens of a sample.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from slime_core.contracts.media import MediaPacker
from slime_core.errors import DataError
from slime_core.types.batch import Batch, Int64
from slime_core.types.image import Image
from slime_core.types.microbatch import MicroImages
from slime_models.media.image_processor import ImageProcessor, Pixels

CACHE_BYTES: Final = 2 << 30


class PixelCache(MediaPacker):
    """Keeps the pixels of the images that were used last: scoring and training of a step use the same ones."""

    def __init__(self, load: Callable[[], ImageProcessor], *, limit: int = CACHE_BYTES) -> None:
        """`load` is called when the first image comes."""
        self._load = load
        self._limit = limit
        self._processor: ImageProcessor | None = None
        self._held: OrderedDict[bytes, Pixels] = OrderedDict()
        self._size = 0

    @property
    def processor(self) -> ImageProcessor:
        if self._processor is None:
            self._processor = self._load()
        return self._processor

    def pixels(self, image: Image) -> Pixels:
        data = image.data
        found = self._held.get(data)
        if found is None:
            found = self._held[data] = self.processor.pixels(image)
            self._size += found.values.nbytes
            while self._size > self._limit and len(self._held) > 1:
                self._size -= self._held.popitem(last=False)[1].values.nbytes
        self._held.move_to_end(data)
        return found

    def pack(self, batch: Batch, samples: Int64) -> MicroImages | None:
        """DataError if a prompt's image tokens are not as many as its images have features."""
        images = batch.images
        if images is None or not images.counts[samples].any():
            return None
        pixels: dict[int, Pixels] = {}
        first: dict[int, int] = {}
        features = 0
        of_tokens = []
        for sample in samples.tolist():
            seen = []
            for number, places in zip(images.of_sample(sample).tolist(), images.places_of(sample), strict=True):
                if number not in pixels:
                    pixels[number] = self.pixels(images.image(number))
                    first[number] = features
                    features += pixels[number].num_tokens
                rows = first[number] + np.arange(pixels[number].num_tokens)
                seen.append(Seen(rows, places, self.processor.token_of(images.image(number))))
            of_tokens.append(token_features(batch, sample, seen, self.processor.token_id))
        return MicroImages(
            pixel_values=torch.from_numpy(np.concatenate([image.values for image in pixels.values()])),
            grid_thw=torch.from_numpy(np.concatenate([image.grids for image in pixels.values()])),
            feature_of_token=torch.from_numpy(np.concatenate(of_tokens)),
        )


class Seen(NamedTuple):
    """An image of a sample: rows of features, and where they begin, if that is known."""

    rows: Int64
    places: tuple[int, ...]
    token_id: int


def token_features(batch: Batch, sample: int, seen: Sequence[Seen], token_id: int) -> Int64:
    """(T,) of one sample: the row of features that a token gets; -1 where it gets none. Without `places`, the prompt's image
    tokens get the rows, in order. Tokens that the model wrote get none, image tokens too."""
    start, prompt_length = batch.token_offsets[sample], int(batch.prompt_length[sample])
    tokens = batch.tokens[start : start + int(batch.total_length[sample])]
    of_token = np.full(len(tokens), -1, np.int64)
    if not seen:
        # A prompt without images may have the token as any other.
        return of_token
    rows = np.concatenate([image.rows for image in seen])
    if all(image.places for image in seen):
        places = np.concatenate([places_of(image) for image in seen])
        expected = np.repeat([image.token_id for image in seen], [len(image.rows) for image in seen])
        fits = len(places) == len(rows) and places.max() < len(tokens) and bool((tokens[places] == expected).all())
    else:
        places = np.flatnonzero(tokens[:prompt_length] == token_id)
        fits = len(places) == len(rows)
    if not fits:
        raise DataError(
            f"sample {batch.index[sample]}: its prompt has {int((tokens[:prompt_length] == token_id).sum())} image tokens, and "
            f"its images have {len(rows)} features: they were rendered with another image processor than this model's."
        )
    of_token[places] = rows
    return of_token


def places_of(image: Seen) -> Int64:
    """Place of each feature in the tokens of the sample."""
    each = len(image.rows) // len(image.places)
    found: Int64 = (np.array(image.places, np.int64)[:, None] + np.arange(each)).reshape(-1)
    return found
