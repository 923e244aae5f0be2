"""Whether a batch had something to teach the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_core.algorithm.metrics import ZERO_STD_FRAC, zero_std_metrics
from slime_core.types.batch import Batch, TokenColumns


def no_signal(batch: Batch, columns: TokenColumns, steps: Sequence[Mapping[str, float]]) -> str | None:
    """Why the batch taught the policy nothing; None if it did. `steps`: metrics of its optimizer steps, without prefix. What
    counts is the gradient, so algorithms that compare no groups are judged alike. A skipped step does not count."""
    if any(step["skipped_steps"] for step in steps):
        return None
    trained = batch.mask != 0
    if not trained.any():
        return f"none of {batch.num_samples} samples has a token to train: their responses are empty, masked or removed"
    if all(step["grad_norm"] == 0 for step in steps):
        found = "the gradient is 0"
    elif columns.advantages is not None and not columns.advantages[trained].any():
        found = "all advantages are 0, so only other terms of the loss, such as KL and entropy, have a gradient"
    else:
        return None
    equal = zero_std_metrics(batch).get(ZERO_STD_FRAC)
    causes = [] if equal is None else [f"{equal:.0%} of the groups have equal rewards"]
    if "pg_clipfrac" in steps[-1]:
        causes.append(f"{steps[-1]['pg_clipfrac']:.0%} of the tokens are clipped")
    causes.append(f"learning rate {steps[-1]['lr-pg_0']:g}")
    return f"{found} ({', '.join(causes)})"
