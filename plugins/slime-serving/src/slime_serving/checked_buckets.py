"""CheckedBuckets: checks that buckets arrive in order, with the tensors of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from slime_core.data.model_folder import shapes_in
from slime_core.errors import EngineError
from slime_core.types.weights import Bucket
from slime_training.bucket_order import BucketOrder, missing_error, unexpected_problem

ALIGNMENT: Final = 16
"""In bytes. A view of another dtype must begin at a multiple of its size."""
TIED: Final = frozenset({"lm_head.weight"})
"""Tensors that may be missing if they are the embedding."""


def layout(bucket: Bucket) -> tuple[list[tuple[int, int]], int]:
    """(start, end) of each tensor in bytes, and the total size."""
    places = []
    position = 0
    for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
        size = int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        places.append((position, position + size))
        position += -(-size // ALIGNMENT) * ALIGNMENT
    return places, max(position, 1)


class CheckedBuckets(BucketOrder):
    """Checks that buckets arrive in order, with the tensors of a model folder."""

    def __init__(self, model_path: Path, engine: str) -> None:
        super().__init__(engine)
        self._shapes = shapes_in(model_path)

    def check(self, bucket: Bucket) -> None:
        """Raises EngineError, before anything is loaded, if the bucket is out of order, damaged or of another model, or if it
        is the last one and tensors are missing. The version must then be sent again from its first bucket."""
        where = self.expect(bucket)
        size = sum(end - start for start, end in layout(bucket)[0])
        if size != bucket.data.nbytes:
            raise EngineError(f"{where} is damaged: its tensors need {size} bytes, it holds {bucket.data.nbytes}.")
        problems = [*self._problems(bucket), *self.further_problems(bucket)]
        if problems:
            raise EngineError(f"{where} does not fit the model: {'; '.join(problems)}.")
        if bucket.last:
            missing = sorted(set(self._shapes) - self.arrived_with(bucket) - TIED)
            if missing:
                raise missing_error(where, missing)

    def further_problems(self, bucket: Bucket) -> Sequence[str]:
        """What else the servers' program cannot load."""
        return ()

    def _problems(self, bucket: Bucket) -> list[str]:
        if not self._shapes:
            return []
        problems = []
        # A tied head may be in the folder under either name, or under both.
        unexpected = [name for name in bucket.names if name not in self._shapes and name not in TIED]
        if unexpected:
            problems.append(unexpected_problem(unexpected, self._shapes))
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            own = self._shapes.get(name)
            if own is not None and tuple(shape) != own:
                problems.append(f"{name} has shape {tuple(shape)}, the model's is {own}")
        return problems
