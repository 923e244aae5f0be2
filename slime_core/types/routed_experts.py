"""Expert ids: the experts that the router of each layer chose for a token.

Legend: T tokens of a sequence, L layers of the model, dense ones included (their ids have no meaning), K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

RoutedExperts: TypeAlias = npt.NDArray[np.unsignedinteger]
"""(rows, L, K) uint8, or uint16 if an id is above 255; row j belongs to the forward of token j."""


def narrow(ids: npt.NDArray[np.integer]) -> RoutedExperts:
    """Casts ids, at least 0, to the smaller of the two dtypes that holds them."""
    wide = ids.max(initial=0) > np.iinfo(np.uint8).max
    return ids.astype(np.uint16 if wide else np.uint8)


def unread(rows: int, layers: int, top_k: int) -> RoutedExperts:
    """Ids for tokens that were no input of a forward: distinct ones, since a token uses an expert once."""
    return np.broadcast_to(np.arange(top_k, dtype=np.uint8), (rows, layers, top_k))


def filled_up(parts: Sequence[RoutedExperts | None], lengths: Sequence[int]) -> RoutedExperts | None:
    """Pads every sequence's rows to its length: (sum of lengths, L, K); None if no sequence has ids."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    _, layers, top_k = given[0].shape
    rows: list[RoutedExperts] = []
    for part, length in zip(parts, lengths, strict=True):
        held = 0 if part is None else len(part)
        rows += [] if part is None else [part]
        rows.append(unread(length - held, layers, top_k))
    return np.concatenate(rows)
