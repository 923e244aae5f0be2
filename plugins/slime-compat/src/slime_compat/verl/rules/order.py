"""The rules, in the order in which they see the keys."""

from __future__ import annotations

from slime_compat.peer import PeerTranslation
from slime_compat.verl.rules.algorithm import algorithm
from slime_compat.verl.rules.batches import batches
from slime_compat.verl.rules.data import data, evaluation
from slime_compat.verl.rules.launcher import launcher, sampling
from slime_compat.verl.rules.model import backend, model
from slime_compat.verl.rules.optimizer import critic, optimizer
from slime_compat.verl.rules.reward import reward
from slime_compat.verl.rules.run import run


def apply(translation: PeerTranslation, *, megatron: bool) -> None:
    """Applies all rules, which fill the tables and notes. megatron: the keys are those of verl's configuration for it."""
    for rule in (run, model, batches, data, evaluation, sampling, algorithm, reward, launcher, backend):
        rule(translation)
    # Schedules need the number of steps, and the critic's optimizer that of the policy.
    optimizer(translation, megatron=megatron)
    critic(translation, megatron=megatron)
