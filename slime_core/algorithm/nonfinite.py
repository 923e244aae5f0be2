"""Samples that cannot be trained on: one of their log-probs or values is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from slime_core.errors import TrainingError
from slime_core.types.batch import Batch, Float32, Int64

LEFT_OUT: Final = -1
"""Optimizer step of a sample that is not trained on."""


def nonfinite_samples(batch: Batch, columns: Mapping[str, Float32]) -> dict[int, str]:
    """Positions of samples with a trained token that is not finite in one of the columns (M,), with that column's name."""
    found: dict[int, str] = {}
    for name, column in columns.items():
        bad = ~np.isfinite(column) & batch.mask.astype(np.bool_)
        for sample in np.unique(batch.sample_of_token[bad]) if bad.any() else ():
            found.setdefault(int(sample), name)
    return found


def name_samples(batch: Batch, found: Mapping[int, str]) -> str:
    """Text that lists the first three of these samples for a message."""
    listed = [
        f"sample {batch.index[sample]} (group {batch.group_index[sample]}): {column}"
        for sample, column in list(found.items())[:3]
    ]
    return "; ".join(listed) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def mask_samples(
    batch: Batch, columns: Mapping[str, Float32], step_of_sample: Int64, samples: Int64
) -> tuple[Batch, dict[str, Float32], Int64]:
    """Masks these samples: 0 in their rows of the columns, and no optimizer step. Their rewards still count in their groups,
    and they count in denominators over rollouts, as with `remove_sample`."""
    steps = step_of_sample.copy()
    steps[samples] = LEFT_OUT
    for step in range(int(step_of_sample.max()) + 1):
        if not (steps == step).any():
            raise TrainingError(f"all samples of optimizer step {step} have log-probs or values that are not finite.")
    out = np.isin(batch.sample_of_token, samples)
    mask = np.where(out, 0, batch.mask).astype(batch.mask.dtype)
    log_probs = np.where(out, 0, batch.rollout_log_probs).astype(np.float32)
    finite = {name: np.where(out, 0, column).astype(np.float32) for name, column in columns.items()}
    return replace(batch, mask=mask, rollout_log_probs=log_probs), finite, steps
