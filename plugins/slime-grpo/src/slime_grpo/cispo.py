"""CispoLoss: REINFORCE with a clipped, constant importance weight."""

from __future__ import annotations

from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments
from slime_grpo.surrogate import ClipRange, MaskedInputs, exp_log_ratio


class CispoLoss(PolicyLoss):
    """L = -sg(clip(rho)) A l.

    Differs from `ClipLoss` in what is clipped: here only the weight, so a token outside the bounds still has a gradient.
    Source: arXiv:2506.13585, CISPO. Metrics: `pg_clipfrac`, the share of tokens whose weight the clip
    changed, and `ppo_kl`, old - l.
    """

    def __init__(self, bounds: ClipRange) -> None:
        self._bounds = bounds

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        masked = MaskedInputs.of(inputs)
        ratio = exp_log_ratio(masked.log_ratio.detach())
        weight = ratio.clamp(self._bounds.low, self._bounds.high)
        values = -weight * masked.advantages * masked.log_probs
        return LossOutput(
            values=values,
            metrics={"pg_clipfrac": (weight != ratio).to(values.dtype), "ppo_kl": -masked.log_ratio.detach()},
        )
