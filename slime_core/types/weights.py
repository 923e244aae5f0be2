"""Bucket: some named tensors of a policy version, flattened into one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Whole (unsharded) tensors, concatenated in `data`; bucket `index` (from 0) of policy `version`."""

    version: int
    index: int
    last: bool
    names: Sequence[str]
    """Hugging Face names."""
    dtypes: Sequence[str]
    """torch's names without the prefix ("bfloat16")."""
    shapes: Sequence[tuple[int, ...]]
    data: npt.NDArray[np.uint8]
    checksum: str
    """xxh3-64 of the bytes of `data`, in hex."""
