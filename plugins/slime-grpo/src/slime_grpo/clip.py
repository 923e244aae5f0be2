"""ClipLoss: PPO's clipped surrogate, per token, with an optional dual clip."""

from __future__ import annotations

import torch

from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments
from slime_grpo.surrogate import ClipRange, MaskedInputs, clipped_surrogate, exp_log_ratio


class ClipLoss(PolicyLoss):
    """L = max(-rho A, -clip(rho) A); with the dual clip, min(L, -c A) where A < 0.

    Sources: arXiv:1707.06347, equation 7; dual clip: "Mastering Complex Control in MOBA Games with Deep Reinforcement
    Learning", arXiv:1912.09729. Metrics: `pg_clipfrac`, the share of tokens whose gradient is 0
    because of the clip (the dual clip does not count), and `ppo_kl`, old - l.
    """

    def __init__(self, bounds: ClipRange, dual_bound: float | None = None) -> None:
        self._bounds = bounds
        self._dual_bound = dual_bound

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        masked = MaskedInputs.of(inputs)
        values, clipped = clipped_surrogate(exp_log_ratio(masked.log_ratio), masked.advantages, self._bounds)
        if self._dual_bound is not None:
            ceiling = torch.minimum(values, -self._dual_bound * masked.advantages)
            values = torch.where(masked.advantages < 0, ceiling, values)
        return LossOutput(
            values=values,
            metrics={"pg_clipfrac": clipped.to(values.dtype), "ppo_kl": -masked.log_ratio.detach()},
        )
