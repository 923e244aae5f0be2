"""The rules, in the order in which they see the keywords."""

from __future__ import annotations

from slime_compat.trl.rules.algorithm import algorithm
from slime_compat.trl.rules.batches import batches, schedule
from slime_compat.trl.rules.data import data, model
from slime_compat.trl.rules.launcher import backend, launcher, sampling
from slime_compat.trl.rules.reward import reward
from slime_compat.trl.rules.run import evaluation, run
from slime_compat.trl.translation import TrlTranslation


def apply(translation: TrlTranslation) -> None:
    """Applies all rules, which fill the tables and notes. Batches are first: other rules count their steps."""
    for rule in (batches, schedule, run, model, data, sampling, algorithm, reward, evaluation, launcher, backend):
        rule(translation)
