"""Cross-checks of trained roles: the recipe, the parts, the backends, and settings of roles that are not trained."""

from __future__ import annotations

from collections.abc import Iterable

from slime_core.config.bound import BoundEngines, BoundRun
from slime_core.config.roles import LOSS_KEYS
from slime_core.config.run import RoleConfig
from slime_core.contracts.engine import Capability
from slime_core.contracts.needs import Need
from slime_core.errors import unknown_name


def asked_roles(run: BoundRun) -> Iterable[str]:
    """A recipe names its roles and a loss for each."""
    algo = run.algo
    for role in sorted(set(algo.recipe.roles) - set(LOSS_KEYS)):
        yield unknown_name(f'algo.name = "{algo.name}", role', role, "trained role", list(LOSS_KEYS))
    for role, key in LOSS_KEYS.items():
        asked, loss = role in algo.recipe.roles, getattr(algo, key)
        if asked and loss is None:
            yield (
                f'algo.{key}: algorithm "{algo.name}" trains a {role}, but names no loss for it: a recipe with a missing '
                f"part. Pass --{key.replace('_', '-')} NAME."
            )
        if loss is not None and not asked:
            yield f'algo.{key} = "{loss.name}": algorithm "{algo.name}" has no role {role}. Leave it out.'


def settings_without_role(run: BoundRun) -> Iterable[str]:
    """Settings of a role that is not trained would have no effect."""
    algo, launcher = run.algo, run.config.launcher
    for role in LOSS_KEYS:
        if role not in algo.recipe.roles and getattr(run.config.roles, role) != RoleConfig():
            yield f'roles.{role}: algorithm "{algo.name}" trains no {role}. Leave the table out.'
    for key in ("critic_num_nodes", "critic_num_gpus_per_node"):
        value = getattr(launcher, key)
        if value is not None and algo.critic_loss is None:
            yield f'launcher.{key} = {value}: algorithm "{algo.name}" trains no critic. Leave it out.'
        elif value is not None and run.launcher.driver.single_process:
            yield (
                f'launcher.{key} = {value}: with launcher.name = "{run.launcher.name}" all roles share this process. Pass '
                f"{run.other_launchers}, or leave it out."
            )
    if (steps := algo.keys.num_critic_only_steps) and algo.critic_loss is None:
        yield f'algo.num_critic_only_steps = {steps}: algorithm "{algo.name}" trains no critic. Leave it out.'


def losses_of_roles(run: BoundRun) -> Iterable[str]:
    """A role with a value head has a loss that trains values; an algorithm whose parts need values has such a role."""
    for role in run.roles:
        driver = role.loss.driver
        if driver.trains_values != (role.head == "value"):
            trained = "values" if driver.trains_values else "log-probs"
            yield f'algo: loss "{role.loss.name}" trains {trained} and does not fit the {role.name}.'
    if Need.VALUES in run.algo.needs and not any(role.head == "value" for role in run.roles):
        yield f'algo.name = "{run.algo.name}": its parts need values, but it has no role that learns them.'


def needs(run: BoundRun) -> Iterable[str]:
    """Every role asks its own backend."""
    for role in run.roles:
        provides = role.backend.driver.provides
        if missing := sorted(role.needs - provides):
            yield (
                f'{role.backend.where}.name = "{role.backend.name}": the {role.name} of algorithm "{run.algo.name}" needs '
                f"{', '.join(missing)}, which this backend does not provide. It provides {', '.join(sorted(provides))}."
            )


def optimizers(run: BoundRun) -> Iterable[str]:
    """Every role asks its own backend."""
    asked = [(role.backend, role.optimizer_part) for role in run.roles]
    return dict.fromkeys(p for b, o in asked for p in b.driver.optimizer_problems(b.config, o.entry.name, o.driver))


def teacher(run: BoundRun) -> Iterable[str]:
    """A teacher that the algorithm needs has a folder, and a teacher that is set is needed."""
    folder, algo = run.config.model.opd_teacher_load, run.algo
    needed = Need.TEACHER_LOGPROBS in algo.needs
    if run.teacher is not None:
        yield from teacher_engines(run, run.teacher, needed=needed)
    elif needed and folder is None:
        readers = sorted({p.name for p in algo.parts if Need.TEACHER_LOGPROBS in getattr(p.driver, "needs", ())})
        yield (
            f'model.opd_teacher_load: {", ".join(readers)} of algorithm "{algo.name}" compares with a teacher, and none is '
            "given. Pass --opd-teacher-load FOLDER, a Hugging Face model with the same tokenizer; or, for engines of its own, "
            "--engines.teacher.load FOLDER."
        )
    elif folder is not None and not needed:
        yield f'model.opd_teacher_load: no part of algorithm "{algo.name}" compares with a teacher. Leave it out.'


def teacher_engines(run: BoundRun, engines: BoundEngines, *, needed: bool) -> Iterable[str]:
    """A teacher behind engines of its own."""
    temperature = run.config.rollout.rollout_temperature
    if not needed:
        yield f'engines.teacher: no part of algorithm "{run.algo.name}" compares with a teacher. Leave it out.'
    if run.config.model.opd_teacher_load is not None:
        yield (
            "engines.teacher and model.opd_teacher_load: the teacher is behind engines or beside the trainer. Leave one "
            "of them out."
        )
    if Capability.SCORES not in engines.engine.driver.optional_capabilities:
        yield f'engines.teacher: engine "{engines.engine.name}" gives no log-probs of given tokens.'
    if temperature != 1:
        yield (
            f"engines.teacher, rollout.rollout_temperature = {temperature}: engines give log-probs at temperature 1. Use that, "
            "or model.opd_teacher_load."
        )
    if run.config.launcher.colocate:
        yield "engines.teacher, launcher.colocate = true: a teacher behind engines needs devices of its own."
