"""Changes slime's own objective, as a pytest plugin: what no recipe can get wrong by itself."""

from slime_core.algorithm import advantages as credit
from slime_core.algorithm.loss import TokenObjective

weigh = credit.loss_weights


def too_heavy(*given):
    return weigh(*given) * 1.1


def with_gradient(self, column, log_probs):
    return log_probs if self.old_from_current else column


credit.loss_weights = too_heavy
TokenObjective._old_log_probs = with_gradient
