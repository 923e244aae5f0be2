"""Finds the optimizer of a trainer."""

from __future__ import annotations

from slime_core import groups
from slime_core.contracts.optimizer import ChosenOptimizer
from slime_core.contracts.setup import TrainerSetup
from slime_core.registry import Registry, bind


def chosen_optimizer(setup: TrainerSetup) -> ChosenOptimizer:
    """Returns the optimizer of the setup; otherwise the installed one of that name with its defaults. Raises PluginError if
    there is none."""
    if setup.chosen_optimizer is not None:
        return setup.chosen_optimizer
    where = "train.optimizer"
    resolved = Registry().resolve(groups.OPTIMIZERS, setup.optimizer.optimizer, where=where)
    return ChosenOptimizer(driver=resolved.driver, options=bind(resolved, {}, where=where))
