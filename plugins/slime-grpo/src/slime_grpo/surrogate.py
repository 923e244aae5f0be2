"""Shared by the losses: the masked log-ratio, and the surrogate that is clipped around a ratio of one.

Legend: T response tokens of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_core.contracts.loss import LossInputs

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class ClipRange:
    """Bounds of the ratio."""

    low: float
    high: float

    @classmethod
    def around_one(cls, eps_clip: float, eps_clip_high: float | None) -> ClipRange:
        return cls(1.0 - eps_clip, 1.0 + (eps_clip if eps_clip_high is None else eps_clip_high))


@dataclass(frozen=True, slots=True, eq=False)
class MaskedInputs:
    """(T,) each, 0 at masked tokens: their values, even NaN, reach neither loss nor gradient."""

    mask: Tensor
    log_probs: Tensor
    """With the gradient."""
    log_ratio: Tensor
    """l - old in nats, with the gradient, not clamped."""
    advantages: Tensor

    @classmethod
    def of(cls, inputs: LossInputs) -> MaskedInputs:
        assert inputs.log_probs is not None
        assert inputs.old_log_probs is not None
        assert inputs.advantages is not None
        log_probs = torch.where(inputs.mask, inputs.log_probs, 0.0)
        old_log_probs = torch.where(inputs.mask, inputs.old_log_probs, 0.0)
        return cls(
            mask=inputs.mask,
            log_probs=log_probs,
            log_ratio=log_probs - old_log_probs,
            advantages=torch.where(inputs.mask, inputs.advantages, 0.0),
        )


def exp_log_ratio(log_ratio: Tensor) -> Tensor:
    """exp of the argument clamped to [-20, 20]; outside, the gradient is zero."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, bounds: ClipRange) -> tuple[Tensor, Tensor]:
    """max(-ratio x A, -clip(ratio) x A), and a bool mask where the clipped term is larger: there the gradient is zero.

    Source: PPO, arXiv:1707.06347, equation 7, with a bound for each side.
    """
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(bounds.low, bounds.high) * advantages
    return torch.maximum(unclipped, clipped), (clipped > unclipped).detach()
