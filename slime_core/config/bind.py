"""Binding: names become drivers, options become their Configs, and everything is checked against everything else.

Nothing is built here and nothing heavy is imported: `slime run --dry-run` and the schema stop at this point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slime_core import groups
from slime_core.config.bind_algo import bind_algo
from slime_core.config.bind_eval import bind_eval_set
from slime_core.config.binder import Binder
from slime_core.config.bound import BoundAlgo, BoundEngines, BoundReward, BoundRun
from slime_core.config.checks import cross_checks
from slime_core.config.part import BoundPlugin
from slime_core.config.plugin_table import PluginTable
from slime_core.config.roles import LOSS_KEYS, POLICY
from slime_core.config.run import EngineRow, RunConfig
from slime_core.config.trained_roles import with_roles
from slime_core.contracts.filter import BufferFilterDriver, FilterDriver
from slime_core.contracts.table import Table
from slime_core.errors import ConfigError
from slime_core.registry import Registry


def bind_run(config: RunConfig, registry: Registry, *, base: Path, problems: Sequence[str] = ()) -> BoundRun:
    """Binds a run file. ConfigError has every problem of names, options and their combination, after the `problems` that
    are known already."""
    binder = Binder(registry, base, list(problems))
    algo = bind_algo(config.algo, binder)
    backend = binder.part(groups.BACKENDS, config.backend, "backend")
    role_backends = bind_of_roles(config, binder, "backend", groups.BACKENDS)
    optimizers = bind_of_roles(config, binder, "optimizer", groups.OPTIMIZERS)
    if optimizer := binder.part(groups.OPTIMIZERS, config.train.optimizer, "train.optimizer"):
        optimizers = {POLICY: optimizer, **optimizers}
    engine = binder.part(groups.ENGINES, config.engine, "engine")
    teacher = bind_engines("teacher", config.engines.teacher, engine, binder)
    reward_model = bind_engines("reward", config.engines.reward, engine, binder)
    transport = bind_sync(config, engine, binder)
    source = binder.part(groups.SOURCES, options_beside(config.data, config.data.source, "data.source"), "data")
    renderer = binder.part(groups.RENDERERS, config.data.renderer, "data.renderer")
    rewards = bind_rewards(config, binder)
    generate = binder.part(groups.GENERATORS, config.generate, "generate")
    collector = bind_collector(config, algo, binder)
    buffer_filter = binder.part(
        groups.FILTERS, config.rollout.buffer_filter, "rollout.buffer_filter", BufferFilterDriver
    )
    filters = bind_filters(config, algo, binder)
    launcher = binder.part(
        groups.LAUNCHERS, options_beside(config.launcher, config.launcher.name, "launcher.name"), "launcher"
    )
    trackers = binder.parts(groups.TRACKERS, config.trackers, "trackers")
    middlewares = binder.parts(groups.MIDDLEWARES, config.router.middlewares, "router.middlewares")
    media = bind_media(config, binder)
    sets = () if config.train.debug_train_only else config.eval.datasets
    evals = tuple(bind_eval_set(config, name, binder, rewards, generate) for name in sets)
    # eval.defaults is bound once for each set, so its problems repeat.
    binder.problems[:] = dict.fromkeys(binder.problems)
    if binder.problems or None in (
        algo, backend, engine, source, renderer, generate, collector, buffer_filter, launcher
    ):  # fmt: skip
        raise ConfigError(binder.problems)
    assert algo and backend and engine and source and renderer  # noqa: PT018
    assert generate and collector and buffer_filter and launcher  # noqa: PT018
    bound = BoundRun(
        config=config, registry=registry, base=base, algo=algo, backend=backend, role_backends=role_backends,
        optimizers=optimizers, engine=engine, transport=transport, source=source, renderer=renderer, rewards=rewards,
        generate=generate, collector=collector, buffer_filter=buffer_filter, filters=filters, launcher=launcher,
        trackers=trackers, middlewares=middlewares, media=media, evals=evals, teacher=teacher, reward_model=reward_model,
    )  # fmt: skip
    run = with_roles(bound)
    if contradictions := cross_checks(run):
        raise ConfigError(contradictions)
    return run


def bind_of_roles(config: RunConfig, binder: Binder, key: str, group: str) -> dict[str, BoundPlugin]:
    """The plugins of roles that name one of their own, by role. `key`: the key in the role's table."""
    named = {role: getattr(getattr(config.roles, role), key) for role in LOSS_KEYS}
    bound = {
        role: binder.part(group, table, f"roles.{role}.{key}") for role, table in named.items() if table is not None
    }
    return {role: part for role, part in bound.items() if part is not None}


def bind_sync(config: RunConfig, engine: BoundPlugin | None, binder: Binder) -> BoundPlugin | None:
    """The weight transport: the one that is named, else the first that the engine understands."""
    preferred = engine.driver.transports if engine else ()
    name = config.sync.transport or next(iter(preferred), None)
    return (
        None
        if name is None
        else binder.part(groups.TRANSPORTS, options_beside(config.sync, name, "sync.transport"), "sync")
    )


def options_beside(table: Table, name: str, where: str) -> PluginTable:
    """The keys of a table that are not the kernel's, as options of the plugin `name`, which the key `where` chooses."""
    if "name" in (table.model_extra or {}):
        raise ConfigError(f"{where.rpartition('.')[0]}.name: unknown option; {where} chooses the plugin")
    return PluginTable.model_validate({"name": name, **(table.model_extra or {})})


def bind_media(config: RunConfig, binder: Binder) -> tuple[BoundPlugin, ...]:
    """A driver for each modality."""
    where = "data.multimodal_keys"
    tables = [PluginTable(name=modality) for modality in config.data.multimodal_keys]
    bound = [binder.part(groups.MEDIA, table, where, key=where) for table in tables]
    return tuple(part for part in bound if part is not None)


def bind_collector(config: RunConfig, algo: BoundAlgo | None, binder: Binder) -> BoundPlugin | None:
    """The collector: `replay` for a dump, else the one that is named, the recipe's, or the default of this kind of run."""
    rollout = config.rollout
    own = "pool" if rollout.in_flight or rollout.partial_rollout else "accepted"
    table = rollout.collector or PluginTable(name=(algo and algo.recipe.collector) or own)
    if rollout.load_debug_rollout_data is not None:
        table = PluginTable.model_validate({"name": "replay", "folder": rollout.load_debug_rollout_data})
    return binder.part(groups.COLLECTORS, table, "rollout.collector")


def bind_filters(config: RunConfig, algo: BoundAlgo | None, binder: Binder) -> tuple[BoundPlugin, ...]:
    """The recipe's filters, then the run's. A filter that both name has the run's options."""
    own = config.rollout.filters
    chosen = {table.name for table in own}
    of_recipe = () if algo is None else (PluginTable(name=name) for name in algo.recipe.filters if name not in chosen)
    return binder.parts(groups.FILTERS, (*of_recipe, *own), "rollout.filters", FilterDriver)


def bind_engines(name: str, row: EngineRow | None, of_run: BoundPlugin | None, binder: Binder) -> BoundEngines | None:
    """A row of the engines table; `of_run`: the policy's engine, which serves it unless the row names one."""
    if row is None:
        return None
    engine = of_run if row.engine is None else binder.part(groups.ENGINES, row.engine, f"engines.{name}.engine")
    if engine is None:
        return None
    return BoundEngines(
        name=name,
        engine=engine,
        model_path=Path(row.load),
        num_engines=row.num_engines,
        num_devices=row.num_gpus_per_engine,
    )


def bind_rewards(config: RunConfig, binder: Binder) -> tuple[BoundReward, ...]:
    """The run's rewards: one, or several with their weights."""
    if not config.rewards:
        part = None if config.reward is None else binder.part(groups.REWARDS, config.reward, "reward")
        return () if part is None else (BoundReward.alone(part, config.rollout.reward_key),)
    if config.reward is not None:
        binder.problems.append(
            "reward and rewards: both are set. Set `reward` for one reward, or list all of them in `rewards`."
        )
    if config.rollout.reward_key is not None:
        binder.problems.append(
            "rollout.reward_key: with several rewards each has its own: put reward_key into its table in `rewards`."
        )
    bound = []
    for number, table in enumerate(config.rewards):
        part = binder.part(groups.REWARDS, table, f"rewards[{number}]")
        if part is not None:
            reward = BoundReward.alone(part, table.reward_key)
            bound.append(replace(reward, weight=table.weight, label=table.label or table.name))
    labels = [reward.label for reward in bound]
    binder.problems.extend(
        f'rewards: two are called "{label}", and metrics need a name for each: give one a `label`.'
        for label in sorted({label for label in labels if labels.count(label) > 1})
    )
    return tuple(bound)
