"""opsm: off-policy sequence masking.

Legend: T response tokens of the micro-batch, S samples.
"""

from __future__ import annotations

import torch

from slime_core.contracts.correction import LossCorrection, OffPolicyCorrection
from slime_core.contracts.loss import LossInputs, Segments


class OffPolicySequenceMask(OffPolicyCorrection):
    """Masks tokens with A_t < 0 of samples whose mean of old_t - l_t over the trained tokens is above delta: bad responses
    whose probability the policy has already reduced.

    Source: "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", arXiv:2512.02556, off-policy sequence
    masking. Metric: opsm_clipfrac, the share of trained tokens that are masked.
    """

    def __init__(self, *, delta: float) -> None:
        self._delta = delta

    def correct_loss(self, inputs: LossInputs, segments: Segments) -> LossCorrection:
        assert inputs.log_probs is not None
        assert inputs.old_log_probs is not None
        assert inputs.advantages is not None
        mask = inputs.mask
        log_probs_T = torch.where(mask, inputs.log_probs.detach(), 0.0)
        gap_T = torch.where(mask, inputs.old_log_probs, 0.0) - log_probs_T
        num_trainable_S = segments.seq_sum(mask.to(gap_T.dtype))
        mean_gap_S = segments.seq_sum(gap_T) / num_trainable_S.clamp(min=1.0)
        left_out_T = mask & (inputs.advantages < 0) & (segments.expand(mean_gap_S) > self._delta)
        fraction_T = left_out_T.to(gap_T.dtype)
        return LossCorrection(weights=1.0 - fraction_T, metrics={"opsm_clipfrac": fraction_T})
