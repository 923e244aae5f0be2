"""Scores of a micro-batch, from what a forward gave."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from slime_core.contracts.backend import Scores
from slime_core.types.microbatch import MicroBatch


def scores_of(micro: MicroBatch, columns: Mapping[str, Tensor]) -> Scores:
    """`columns`: (T',) float32 each, by the fields of `Scores`, on any device; `micro`: whose T' response tokens they are."""
    found = {name: column.cpu().numpy() for name, column in columns.items()}
    return Scores(**found, rows=None if micro.rows is None else micro.rows.cpu().numpy())
