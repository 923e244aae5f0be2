"""The rules, in the order in which they see the flags."""

from __future__ import annotations

from slime_compat.rules.algorithm import algorithm, balance, optimizer
from slime_compat.rules.eval_config import eval_config
from slime_compat.rules.functions import functions, reward
from slime_compat.rules.hooks import claimed, hooks
from slime_compat.rules.launcher import launcher
from slime_compat.rules.loss_function import loss_function
from slime_compat.rules.model import model
from slime_compat.rules.rollout import data, rollout
from slime_compat.rules.same_names import same_names
from slime_compat.rules.server_groups import server_groups
from slime_compat.rules.stages import stages
from slime_compat.rules.trackers import trackers
from slime_compat.rules.trainer_hooks import trainer_hooks
from slime_compat.translation import Translation


def apply(translation: Translation) -> None:
    """Applies all rules, which fill the tables and notes."""
    for rule in (
        algorithm,
        optimizer,
        balance,
        model,
        launcher,
        stages,
        server_groups,
        data,
        trackers,
        rollout,
        reward,
        eval_config,
        claimed,
        # Options belong to the plugins that the rules above have chosen.
        same_names,
        # Last: the arguments of functions are no options of these plugins.
        functions,
        hooks,
        trainer_hooks,
        loss_function,
    ):
        rule(translation)
