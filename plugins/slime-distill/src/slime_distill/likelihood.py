"""NegativeLogLikelihood: the loss of supervised learning."""

from __future__ import annotations

import torch

from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments


class NegativeLogLikelihood(PolicyLoss):
    """-l_t, in nats. Relative to a policy gradient: advantage 1, no ratio."""

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        if inputs.log_probs is None:
            raise ValueError("the likelihood is a loss of a language model: log_probs are missing")
        return LossOutput(values=torch.where(inputs.mask, -inputs.log_probs, torch.zeros_like(inputs.log_probs)))
