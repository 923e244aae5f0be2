"""tis: truncated importance sampling between trainer and engine."""

from __future__ import annotations

from slime_core.contracts.correction import LossCorrection, OffPolicyCorrection
from slime_core.contracts.loss import LossInputs, Segments
from slime_estimators.engine_ratio import engine_ratio, ratio_metrics


class TruncatedImportanceSampling(OffPolicyCorrection):
    """w_t = clip(exp(old_t - rollout_t), low, high).

    Source: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025),
    https://fengyao.notion.site/off-policy-rl, which has no lower bound.
    """

    def __init__(self, *, low: float, high: float) -> None:
        self._low = low
        self._high = high

    def correct_loss(self, inputs: LossInputs, segments: Segments) -> LossCorrection:
        ratio = engine_ratio(inputs)
        weights = ratio.clamp(self._low, self._high)
        return LossCorrection(weights=weights, metrics=ratio_metrics(inputs, ratio, weights))
