"""Changes slime's own objective, as a pytest plugin: what no recipe can get wrong by itself."""

from slime_core.objective import credit
from slime_core.objective.loss import TokenObjective

weigh = credit.loss_weights


def too_heavy(*given):
    return weigh(*given) * 1.1


def with_gradient(self, column, log_probs):
    return log_probs if self.old_from_current else column


credit.loss_weights = too_heavy
TokenObjective._old_log_probs = with_gradient
