"""Half the squared difference."""

from slime_core.contracts.kl import KlEstimator


class Half(KlEstimator):
    def __call__(self, log_probs, ref_log_probs, ratio=None):
        estimate = 0.5 * (log_probs - ref_log_probs) ** 2
        return estimate if ratio is None else ratio * estimate
