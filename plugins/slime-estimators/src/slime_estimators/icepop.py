"""icepop: importance sampling between trainer and engine that masks tokens outside the bounds."""

from __future__ import annotations

import torch

from slime_core.contracts.correction import LossCorrection, OffPolicyCorrection
from slime_core.contracts.loss import LossInputs, Segments
from slime_estimators.engine_ratio import engine_ratio, ratio_metrics


class IcePop(OffPolicyCorrection):
    """w_t = ratio_t if low <= ratio_t <= high, else 0, with ratio_t = exp(old_t - rollout_t).

    Differs from `TruncatedImportanceSampling` only outside the bounds: there a token has no gradient. Source: "Every Step
    Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model", arXiv:2510.18855, section on IcePop.
    """

    def __init__(self, *, low: float, high: float) -> None:
        self._low = low
        self._high = high

    def correct_loss(self, inputs: LossInputs, segments: Segments) -> LossCorrection:
        ratio = engine_ratio(inputs)
        weights = torch.where((ratio >= self._low) & (ratio <= self._high), ratio, 0.0)
        return LossCorrection(weights=weights, metrics=ratio_metrics(inputs, ratio, weights))
