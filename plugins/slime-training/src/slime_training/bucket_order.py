"""BucketOrder: which bucket of new weights an engine takes next, and whether its bytes are what was sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import xxhash

from slime_core.errors import EngineError, near_matches
from slime_core.types.weights import Bucket
from slime_training.listed_names import listed


class BucketOrder:
    """One version after the other, each from index 0 to the bucket marked last."""

    def __init__(self, engine: str) -> None:
        """`engine`: its name in errors."""
        self._engine = engine
        self._version = -1
        self._next = 0
        self.arrived: set[str] = set()
        """Names of the version's tensors so far."""
        self.incomplete = False
        """Some tensors of a version have been loaded and others not: nothing may be sampled."""

    def expect(self, bucket: Bucket) -> str:
        """Returns the name of the bucket for error messages. EngineError if it is out of order or damaged. Until `loaded` is
        called for it, the version must be sent again from its first bucket."""
        where = f"{self._engine}: bucket {bucket.index} of version {bucket.version}"
        if bucket.index == 0:
            self._version, self._next = bucket.version, 0
            self.arrived = set()
        expected, self._next = self._next, -1
        if (bucket.version, bucket.index) != (self._version, expected):
            possible = "0" if expected < 0 else f"{expected} of version {self._version}, or 0"
            raise EngineError(f"{where} is out of order: expected index {possible} to start again.")
        found = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(bucket.data).data)
        if found != bucket.checksum:
            raise EngineError(f"{where} is damaged: checksum {bucket.checksum} was sent, its bytes have {found}.")
        return where

    def arrived_with(self, bucket: Bucket) -> set[str]:
        """`arrived` once this bucket is loaded."""
        return self.arrived | set(bucket.names)

    def loaded(self, bucket: Bucket) -> None:
        self.arrived = self.arrived_with(bucket)
        self._next = -1 if bucket.last else bucket.index + 1
        self.incomplete = not bucket.last


def unexpected_problem(unexpected: Sequence[str], known: Collection[str]) -> str:
    """Of names in a bucket that are none of the model's, with what is close to the first."""
    close = near_matches(unexpected[0], known)
    hint = f" (close to {unexpected[0]}: {', '.join(close)})" if close else ""
    return f"unexpected names {listed(unexpected)}{hint}"


def missing_error(where: str, missing: Sequence[str]) -> EngineError:
    """What is raised at the last bucket of a version."""
    return EngineError(f"{where} is the last, but tensors of the model are missing: {listed(missing)}.")
