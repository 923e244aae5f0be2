"""The rules, in the order in which they see the flags."""

from __future__ import annotations

from slime_compat.rules.algorithm import algorithm, balance, optimizer
from slime_compat.rules.functions import functions, reward
from slime_compat.rules.launcher import launcher
from slime_compat.rules.model import model
from slime_compat.rules.rollout import data, rollout
from slime_compat.rules.same_names import same_names
from slime_compat.rules.trackers import trackers
from slime_compat.translation import Translation


def apply(translation: Translation) -> None:
    """Applies all rules, which fill the tables and notes."""
    for rule in (
        algorithm,
        optimizer,
        balance,
        model,
        launcher,
        data,
        trackers,
        rollout,
        reward,
        # Options belong to the plugins that the rules above have chosen.
        same_names,
        # Last: the arguments of functions are no options of these plugins.
        functions,
    ):
        rule(translation)
