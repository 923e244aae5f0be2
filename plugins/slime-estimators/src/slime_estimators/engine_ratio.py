"""The ratio of the trainer's to the engine's probability of a token, and its metrics in tis and icepop.

Legend: T response tokens of the micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_core.contracts.loss import LossInputs

MAX_LOG_RATIO = 20.0


def engine_ratio(inputs: LossInputs) -> Tensor:
    """(T,) exp(old - rollout), detached, 1 at masked tokens. The exponent is clamped to [-20, 20]."""
    assert inputs.old_log_probs is not None
    assert inputs.rollout_log_probs is not None
    return exp_gap(inputs.old_log_probs, inputs.rollout_log_probs, inputs.mask)


def exp_gap(log_probs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """(T,) exp(log_probs - other), detached, 1 at masked tokens whatever their values."""
    # Selected before the subtraction: inf - inf would be NaN.
    gap = torch.where(mask, log_probs.detach(), 0.0) - torch.where(mask, other, 0.0)
    return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ratio_metrics(inputs: LossInputs, ratio: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """(T,) each: tis, the ratio before any bound; tis_clipfrac, where the bounds changed it; tis_abs, |ratio - 1|; ois,
    the ratio of the current to the old policy."""
    assert inputs.log_probs is not None
    assert inputs.old_log_probs is not None
    return {
        "tis": ratio,
        "tis_clipfrac": (weights != ratio).to(ratio.dtype),
        "tis_abs": (ratio - 1.0).abs(),
        "ois": exp_gap(inputs.log_probs, inputs.old_log_probs, inputs.mask),
    }
