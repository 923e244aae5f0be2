"""Bucket: some named tensors of a policy version, flattened into one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Whole (unsharded) tensors with their Hugging Face names, one after the other in `data`.

    `dtypes` are torch's names without the prefix ("bfloat16"). `checksum` is xxh3-64 of `data`'s bytes, in hex.
    """

    version: int
    index: int
    last: bool
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    data: npt.NDArray[np.uint8]
    checksum: str
