"""What gradients of a batch are computed with: one of its optimizer steps, and the recipe's loss or another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from slime_core import groups as entry_groups
from slime_core.config.bound import BoundRun
from slime_core.config.part import BoundPlugin
from slime_core.contracts.needs import Need
from slime_core.controller.learner import LearnerBatch
from slime_core.errors import ConfigError
from slime_core.workers.agreement import Agreement
from slime_core.workers.objective import OtherObjective

Loss: TypeAlias = str | Mapping[str, Any]
"""Name of an entry point in `slime.losses`; with options, a table with its `name`."""


def step_of(batch: LearnerBatch, step: int | None) -> int:
    """ConfigError if `step` is none of the batch's, or is missing where it has several."""
    if step is None and batch.num_steps > 1:
        raise ConfigError(
            f"forward_backward: this batch has {batch.num_steps} optimizer steps (global_batch_size, num_steps_per_rollout): "
            "pass step=0, then optim_step, and so on; or call train(batch), which takes all of them."
        )
    number = step or 0
    if not 0 <= number < max(1, batch.num_steps):
        raise ConfigError(f"forward_backward: step = {number}, and the batch has {batch.num_steps} optimizer steps.")
    return number


def objective_of(run: BoundRun, loss: Loss | None, batch: LearnerBatch) -> OtherObjective | None:
    """ConfigError for a loss that is no policy's, or that reads what the batch lacks."""
    if loss is None:
        require_read(batch)
        return None
    table = {"name": loss} if isinstance(loss, str) else dict(loss)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f'loss = {loss!r}: no name; pass a name, or {{"name": NAME, ...}} with its options.')
    resolved = run.registry.resolve(entry_groups.LOSSES, name, where="loss")
    part = BoundPlugin.of(resolved, name, table, where="loss", base=run.base)
    if part.driver.trains_values:
        raise ConfigError(f'loss = "{name}": a loss for values; forward_backward takes a policy\'s.')
    at, own = run.config.rollout.rollout_temperature, run.roles[0].loss
    if at != 1 and part.driver.uses_advantages != own.driver.uses_advantages:
        needed, computed = (at, 1) if part.driver.uses_advantages else (1, at)
        raise ConfigError(
            f'loss = "{name}": it is of log-probs at temperature {needed:g}, and with "{own.name}" as the recipe\'s loss this '
            f"run's trainers compute those at {computed:g}. Set rollout.rollout_temperature = 1."
        )
    needs = {need.value for need in part.driver.needs - {Need.ROLLOUT_LOGPROBS, Need.ENTROPY}}
    needs |= {"advantages"} if part.driver.uses_advantages else set()
    if lacking := sorted(needs - batch.columns.present().keys()):
        raise ConfigError(
            f'loss = "{name}": the batch has no {", ".join(lacking)}, which it reads. Pass them to credit as columns, or '
            "with the datums."
        )
    return OtherObjective.of(part, Agreement.of((*run.parts, part), run.registry.plugin_files))


def require_read(batch: LearnerBatch) -> None:
    """ConfigError for given columns that no loss of the recipe reads: it would train as if they were not there."""
    read = frozenset(name for task in batch.tasks for name in task.plan.columns)
    if not batch.scores and (unread := sorted(batch.columns.present().keys() - read)):
        raise ConfigError(
            f"the batch was given {', '.join(unread)}, and the recipe's loss does not read them. Leave them out, or call "
            'forward_backward with a loss that does, such as loss="clip".'
        )
