"""SequenceClipLoss: the clipped surrogate with one ratio for the whole sample.

Legend: T response tokens of the micro-batch, S samples.
"""

from __future__ import annotations

import torch

from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments
from slime_grpo.surrogate import ClipRange, MaskedInputs, clipped_surrogate, exp_log_ratio


class SequenceClipLoss(PolicyLoss):
    """L = max(-s A, -clip(s) A) with s = exp(sum(m (l - old)) / max(sum m, 1)) of the sample, at each of its tokens.

    Differs from `ClipLoss` only in the ratio. The token variant, s_t = sg(s) exp(l_t - sg(l_t)), has the same value;
    its gradient is the same if the advantage is constant in the sample, and otherwise weights each token with its own
    advantage. Source: arXiv:2507.18071, equation 5; the token variant is its GSPO-token.
    Metrics: `pg_clipfrac` and `ppo_kl` as in `ClipLoss`, but both of the sample: ppo_kl is its mean of old - l.
    """

    def __init__(self, bounds: ClipRange, token_level: bool = False) -> None:
        self._bounds = bounds
        self._token_level = token_level

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        masked = MaskedInputs.of(inputs)
        num_trainable_S = segments.seq_sum(masked.mask.to(masked.log_ratio.dtype))
        mean_log_ratio_S = segments.seq_sum(masked.log_ratio) / num_trainable_S.clamp(min=1.0)
        mean_log_ratio_T = segments.expand(mean_log_ratio_S)
        ratio_T = exp_log_ratio(mean_log_ratio_T)
        if self._token_level:
            ratio_T = ratio_T.detach() * (masked.log_probs - masked.log_probs.detach()).exp()
        values, clipped = clipped_surrogate(ratio_T, masked.advantages, self._bounds)
        return LossOutput(
            values=values,
            metrics={
                "pg_clipfrac": clipped.to(values.dtype),
                "ppo_kl": torch.where(masked.mask, -mean_log_ratio_T.detach(), 0.0),
            },
        )
