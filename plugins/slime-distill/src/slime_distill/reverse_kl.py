"""ReverseKl: the difference of the teacher's and the old log-probs as advantage.

Legend: M response tokens.
"""

from __future__ import annotations

import numpy as np

from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs


class ReverseKl(AdvantageEstimator):
    """A_t = -kl_coef (old_t - teacher_t), 0 at masked tokens.

    Over tokens that the student sampled, the mean of old_t - teacher_t estimates KL(student || teacher), in nats per
    token (k1); it is the metric `rollout/opd_reverse_kl`. Rewards are not read.

    Source: arXiv:2306.13649, the reverse KL on the student's own samples.
    """

    def __init__(self, kl_coef: float = 1.0) -> None:
        self._kl_coef = kl_coef

    def estimate(self, inputs: CreditInputs) -> Credit:
        old_M, teacher_M = inputs.columns.old_log_probs, inputs.columns.teacher_log_probs
        if old_M is None or teacher_M is None:
            raise ValueError("reverse_kl requires the columns old_log_probs and teacher_log_probs")
        trained_M = inputs.batch.mask.astype(np.bool_)
        # Selected before the subtraction: masked tokens may have any values, even infinities.
        gap_M = np.where(trained_M, old_M, np.float32(0)) - np.where(trained_M, teacher_M, np.float32(0))
        estimate = float(gap_M[trained_M].mean(dtype=np.float64)) if trained_M.any() else 0.0
        return Credit(
            advantages=(-self._kl_coef * gap_M).astype(np.float32), metrics={"rollout/opd_reverse_kl": estimate}
        )
