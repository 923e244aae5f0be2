"""ValueLoss: the critic's clipped squared error.

Legend: T response tokens of the micro-batch.
"""

from __future__ import annotations

import torch

from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments


class ValueLoss(PolicyLoss):
    """max((V - R)^2, (clip(V, old - c, old + c) - R)^2), without a factor of one half; c None: (V - R)^2.

    R are the returns, old the values before this rollout's training. Metric `value_clipfrac`: the share of tokens whose
    value moved by more than c. Source: the clipping of arXiv:1707.06347's reference code, as described in
    arXiv:2005.12729, section 3.
    """

    def __init__(self, value_clip: float | None) -> None:
        self._value_clip = value_clip

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        assert inputs.values is not None
        assert inputs.old_values is not None
        assert inputs.returns is not None
        # Values at masked tokens, even NaN, reach neither loss nor gradient.
        values_T = torch.where(inputs.mask, inputs.values, 0.0)
        old_T = torch.where(inputs.mask, inputs.old_values, 0.0)
        returns_T = torch.where(inputs.mask, inputs.returns, 0.0)
        moved_T = values_T - old_T
        loss_T = (values_T - returns_T).square()
        clipped_T = torch.zeros_like(loss_T)
        if self._value_clip is not None:
            near_T = old_T + moved_T.clamp(-self._value_clip, self._value_clip)
            loss_T = torch.maximum(loss_T, (near_T - returns_T).square())
            clipped_T = (moved_T.detach().abs() > self._value_clip).to(loss_T.dtype)
        return LossOutput(values=loss_T, metrics={"value_clipfrac": clipped_T})
