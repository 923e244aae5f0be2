"""LogProbs: a loss that shows what it is multiplied with."""

from __future__ import annotations

from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments


class LogProbs(PolicyLoss):
    """The log-probs themselves: the objective is then the sum of their weights times them."""

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        assert inputs.log_probs is not None
        return LossOutput(values=inputs.log_probs)
