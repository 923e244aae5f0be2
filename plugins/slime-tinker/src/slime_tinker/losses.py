"""The losses that are documented for the SDK and that no other plugin has."""

from __future__ import annotations

import torch

from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments
from slime_grpo.surrogate import MaskedInputs, exp_log_ratio


class ImportanceSamplingLoss(PolicyLoss):
    """L = -rho A with rho = exp(l - old), not clipped. Metric: `ppo_kl`, old - l."""

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        masked = MaskedInputs.of(inputs)
        values = -exp_log_ratio(masked.log_ratio) * masked.advantages
        return LossOutput(values=values, metrics={"ppo_kl": -masked.log_ratio.detach()})


class DroLoss(PolicyLoss):
    """L = -(l A - beta/2 (l - old)^2): the quadratic term keeps the policy near the one that sampled. Source: "Offline
    Regularised Reinforcement Learning for Large Language Models Alignment", arXiv:2405.19107. Metric: `ppo_kl`, old - l."""

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        masked = MaskedInputs.of(inputs)
        objective = masked.log_probs * masked.advantages - 0.5 * self._beta * masked.log_ratio.square()
        values = torch.where(masked.mask, -objective, 0.0)
        return LossOutput(values=values, metrics={"ppo_kl": -masked.log_ratio.detach()})
