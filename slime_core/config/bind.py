"""Binding: names become drivers, options become their Configs, and everything is checked against everything else.

Nothing is built here and nothing heavy is imported: `slime run --dry-run` and the schema stop at this point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slime_core import groups
from slime_core.config.algo import AlgoConfig
from slime_core.config.bound import BoundAlgo, BoundEngines, BoundEvalSet, BoundReward, BoundRun, Part
from slime_core.config.checks import cross_checks
from slime_core.config.plugin_table import PluginTable
from slime_core.config.roles import LOSS_KEYS
from slime_core.config.run import EngineRow, RunConfig
from slime_core.contracts.advantage import AdvantageDriver, ShapingDriver
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.filter import BufferFilterDriver, FilterDriver
from slime_core.errors import ConfigError, PluginError, near_matches
from slime_core.registry import Registry, bind
from slime_core.registry.options import problem_line


@dataclass(frozen=True, slots=True)
class Binder:
    """Collects problems instead of stopping at the first."""

    registry: Registry
    base: Path
    problems: list[str]

    def part(self, group: str, table: PluginTable, where: str, expect: type | None = None) -> Part | None:
        """The driver of `table.name` with its options bound; None after noting the problem. `expect` tells apart the
        two kinds of driver that some groups hold."""
        try:
            resolved = self.registry.resolve(group, table.name, where=f"{where}.name", expect=expect)
            config = bind(resolved, table.options, where=where, base=self.base)
        except ConfigError as error:
            self.problems.extend(error.problems)
        except PluginError as error:
            self.problems.append(str(error))
        else:
            return Part(
                group=group, name=table.name, where=where, entry=resolved.entry, driver=resolved.driver, config=config
            )
        return None

    def parts(
        self, group: str, tables: Sequence[PluginTable], where: str, expect: type | None = None
    ) -> tuple[Part, ...]:
        bound = [self.part(group, table, f"{where}[{number}]", expect) for number, table in enumerate(tables)]
        return tuple(part for part in bound if part is not None)


def bind_run(config: RunConfig, registry: Registry, *, base: Path, problems: Sequence[str] = ()) -> BoundRun:
    """Raises ConfigError with every problem of names, options and their combination, after the `problems` that are
    known already."""
    binder = Binder(registry, base, list(problems))
    algo = bind_algo(config.algo, binder)
    backend = binder.part(groups.BACKENDS, config.backend, "backend")
    role_backends = {}
    for role in LOSS_KEYS:
        named = getattr(config.roles, role).backend
        part = None if named is None else binder.part(groups.BACKENDS, named, f"roles.{role}.backend")
        if part is not None:
            role_backends[role] = part
    engine = binder.part(groups.ENGINES, config.engine, "engine")
    teacher = bind_engines("teacher", config.engines.teacher, engine, binder)
    reward_model = bind_engines("reward", config.engines.reward, engine, binder)
    transport_name = config.sync.transport or (
        engine.driver.transports[0] if engine and engine.driver.transports else None
    )
    transport = None
    if transport_name is not None:
        table = PluginTable.model_validate({"name": transport_name, **(config.sync.model_extra or {})})
        transport = binder.part(groups.TRANSPORTS, table, "sync")
    source_table = PluginTable.model_validate({"name": config.data.source, **(config.data.model_extra or {})})
    source = binder.part(groups.SOURCES, source_table, "data")
    rewards = bind_rewards(config, binder)
    generate = binder.part(groups.GENERATORS, config.generate, "generate")
    own_collector = "pool" if config.rollout.in_flight or config.rollout.partial_rollout else "accepted"
    collector_table = config.rollout.collector or PluginTable(name=(algo and algo.recipe.collector) or own_collector)
    if config.rollout.load_debug_rollout_data is not None:
        dump = {"name": "replay", "folder": config.rollout.load_debug_rollout_data}
        collector_table = PluginTable.model_validate(dump)
    collector = binder.part(groups.COLLECTORS, collector_table, "rollout.collector")
    buffer_filter = binder.part(
        groups.FILTERS, config.rollout.buffer_filter, "rollout.buffer_filter", BufferFilterDriver
    )
    recipe_filters = () if algo is None else tuple(PluginTable(name=name) for name in algo.recipe.filters)
    chosen = {table.name for table in config.rollout.filters}
    filters = binder.parts(
        groups.FILTERS,
        (*(table for table in recipe_filters if table.name not in chosen), *config.rollout.filters),
        "rollout.filters",
        FilterDriver,
    )
    trackers = binder.parts(groups.TRACKERS, config.trackers, "trackers")
    middlewares = binder.parts(groups.MIDDLEWARES, config.router.middlewares, "router.middlewares")
    sets = () if config.train.debug_train_only else config.eval.datasets
    evals = tuple(bind_eval_set(config, name, binder, rewards, generate) for name in sets)

    # What eval.defaults says is bound for each set.
    binder.problems[:] = dict.fromkeys(binder.problems)
    if binder.problems or None in (algo, backend, engine, source, generate, collector, buffer_filter):
        raise ConfigError(binder.problems)
    assert algo and backend and engine and source and generate and collector and buffer_filter  # noqa: PT018
    run = BoundRun(
        config=config,
        registry=registry,
        base=base,
        algo=algo,
        backend=backend,
        engine=engine,
        transport=transport,
        source=source,
        rewards=rewards,
        generate=generate,
        collector=collector,
        buffer_filter=buffer_filter,
        filters=filters,
        trackers=trackers,
        middlewares=middlewares,
        evals=evals,
        teacher=teacher,
        reward_model=reward_model,
        role_backends=role_backends,
    )
    if contradictions := cross_checks(run):
        raise ConfigError(contradictions)
    return run


def bind_algo(table: PluginTable, binder: Binder) -> BoundAlgo | None:
    """A recipe under the run file's overrides: kernel keys to AlgoConfig, every other key to the parts that know it."""
    try:
        resolved = binder.registry.resolve(groups.ALGORITHMS, table.name, where="algo.name")
    except PluginError as error:
        binder.problems.append(str(error))
        return None
    recipe = resolved.recipe
    asked = dict(table.options)
    defaults = dict(recipe.options) | {
        "advantage": recipe.advantage,
        "loss": recipe.loss,
        "aggregation": recipe.aggregation,
        "shaping": list(recipe.shaping),
        "corrections": list(recipe.corrections),
    }
    kernel_keys = set(AlgoConfig.model_fields)
    merged = defaults | asked
    try:
        keys = AlgoConfig.model_validate({k: v for k, v in merged.items() if k in kernel_keys})
    except ValidationError as error:
        binder.problems.extend(problem_line(e, AlgoConfig, merged, "slime", "algo") for e in error.errors())
        return None
    slots: list[tuple[str, str, PluginTable, type | None]] = [
        *(() if keys.advantage is None else (("advantage", groups.ADVANTAGES, keys.advantage, AdvantageDriver),)),
        *((f"advantage_terms[{n}]", groups.ADVANTAGES, t, AdvantageDriver) for n, t in enumerate(keys.advantage_terms)),
        ("loss", groups.LOSSES, keys.loss, None),
        *((f"shaping[{n}]", groups.ADVANTAGES, t, ShapingDriver) for n, t in enumerate(keys.shaping)),
        *((f"corrections[{n}]", groups.CORRECTIONS, t, None) for n, t in enumerate(keys.corrections)),
    ]
    for key, wanted in (("kl_loss_type", keys.with_kl_loss), ("kl_reward_type", keys.kl_coef != 0)):
        estimator = getattr(keys, key)
        if wanted and estimator is None:
            names = ", ".join(entry.name for entry in binder.registry.entries(groups.KL)) or "none is installed"
            flag = key.replace("_", "-")
            binder.problems.append(
                f'algo.{key}: a KL term needs an estimator and recipe "{table.name}" names none: say --{flag} with one of '
                f"{names}."
            )
        elif wanted or (key in asked and estimator is not None):
            # A name that was given is looked up even where its term is off: it would only be wrong later.
            slots.append((key, groups.KL, estimator, None))
    role_losses = {key: getattr(keys, key) for key in LOSS_KEYS.values()}
    slots += [(key, groups.LOSSES, table, None) for key, table in role_losses.items() if table is not None]

    known: dict[str, type[DriverConfig]] = {}
    parts: dict[str, Part] = {}
    failed = False
    for slot, group, part_table, expect in slots:
        try:
            part_resolved = binder.registry.resolve(group, part_table.name, where=f"algo.{slot}", expect=expect)
        except PluginError as error:
            binder.problems.append(str(error))
            failed = True
            continue
        fields = part_resolved.driver.Config.model_fields
        known |= dict.fromkeys(fields, part_resolved.driver.Config)
        # What a recipe says to its part does not go to another part that was put in its place.
        of_recipe = {
            "advantage": recipe.advantage,
            "loss": recipe.loss,
            "critic_loss": recipe.options.get("critic_loss"),
        }
        replaced = slot in of_recipe and part_table.name != of_recipe[slot]
        flat = {k: v for k, v in (asked if replaced else merged).items() if k in fields and k not in kernel_keys}
        part = binder.part(
            group,
            PluginTable.model_validate({"name": part_table.name} | flat | dict(part_table.options)),
            f"algo.{slot}" if part_table.options else "algo",
        )
        if part is None:
            failed = True
        else:
            parts[slot] = part
    if failed:
        return None
    unknown = [key for key in asked if key not in kernel_keys and key not in known]
    for key in unknown:
        available = sorted(kernel_keys | set(known))
        close = near_matches(key, available)
        matched = f"; close match: {', '.join(close)}" if close else ""
        named = ", ".join(sorted({part.name for part in parts.values()}))
        binder.problems.append(
            f'algo.{key}: no part of "{table.name}" ({named}) has this option{matched}. Available: {", ".join(available)}.'
        )
    if unknown:
        return None
    return BoundAlgo(
        name=table.name,
        entry=resolved.entry,
        recipe=recipe,
        keys=keys,
        advantage=parts.get("advantage"),
        advantage_terms=tuple(part for slot, part in parts.items() if slot.startswith("advantage_terms")),
        loss=parts["loss"],
        kl_loss=parts.get("kl_loss_type") if keys.with_kl_loss else None,
        kl_reward=parts.get("kl_reward_type") if keys.kl_coef else None,
        critic_loss=parts.get("critic_loss"),
        shaping=tuple(part for slot, part in parts.items() if slot.startswith("shaping")),
        corrections=tuple(part for slot, part in parts.items() if slot.startswith("corrections")),
    )


def bind_engines(name: str, row: EngineRow | None, of_run: Part | None, binder: Binder) -> BoundEngines | None:
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
        return () if part is None else (one_reward(part, config.rollout.reward_key),)
    if config.reward is not None:
        binder.problems.append("reward and rewards: say `reward` for one, or list all of them in `rewards`.")
    if config.rollout.reward_key is not None:
        binder.problems.append(
            "rollout.reward_key: with several rewards each has its own: put reward_key into its table in `rewards`."
        )
    bound = []
    for number, table in enumerate(config.rewards):
        part = binder.part(groups.REWARDS, table, f"rewards[{number}]")
        if part is not None:
            reward = one_reward(part, table.reward_key)
            bound.append(replace(reward, weight=table.weight, label=table.label or table.name))
    labels = [reward.label for reward in bound]
    binder.problems.extend(
        f'rewards: two are called "{label}", and metrics need a name for each: give one a `label`.'
        for label in sorted({label for label in labels if labels.count(label) > 1})
    )
    return tuple(bound)


def one_reward(part: Part, reward_key: str | None) -> BoundReward:
    return BoundReward(part=part, label=part.name, reward_key=reward_key or part.driver.reward_key)


def bind_eval_set(
    config: RunConfig, name: str, binder: Binder, rewards: tuple[BoundReward, ...], generate: Part | None
) -> BoundEvalSet:
    """Precedence per field: set > eval.defaults > eval_* > rollout_* (or the data table's key)."""
    own, evals, rollout, data = config.eval.datasets[name], config.eval, config.rollout, config.data

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    def bound(group: str, field: str, run_wide: Part | None) -> Part | None:
        for table, where in (
            (getattr(own, field), f"eval.datasets.{name}"),
            (getattr(evals.defaults, field), "eval.defaults"),
        ):
            if table is not None:
                return binder.part(group, table, f"{where}.{field}")
        return run_wide

    def pick(field: str, *fallbacks: Any) -> Any:
        return first(getattr(own, field), getattr(evals.defaults, field), *fallbacks)

    def bound_rewards() -> tuple[BoundReward, ...]:
        own_part = bound(groups.REWARDS, "reward", None)
        key = pick("reward_key", evals.eval_reward_key, rollout.reward_key)
        if own_part is not None:
            return (one_reward(own_part, key),)
        return tuple(replace(reward, reward_key=key or reward.reward_key) for reward in rewards)

    fallback_temperature = first(evals.eval_temperature, rollout.rollout_temperature)
    return BoundEvalSet(
        name=name,
        path=own.path,
        num_samples=pick("n_samples_per_eval_prompt", evals.n_samples_per_eval_prompt),
        temperature=pick("temperature", fallback_temperature),
        top_p=pick("top_p", evals.eval_top_p, rollout.rollout_top_p),
        top_k=pick("top_k", evals.eval_top_k, rollout.rollout_top_k),
        max_response_len=pick("max_response_len", evals.eval_max_response_len, rollout.rollout_max_response_len),
        max_prompt_len=pick("max_prompt_len", evals.eval_max_prompt_len, rollout.rollout_max_prompt_len),
        min_new_tokens=pick("min_new_tokens", evals.eval_min_new_tokens),
        repetition_penalty=pick("repetition_penalty", 1.0),
        stop=pick("stop", rollout.rollout_stop),
        stop_token_ids=pick("stop_token_ids", rollout.rollout_stop_token_ids),
        rewards=bound_rewards(),
        generate=bound(groups.GENERATORS, "generate", generate),
        input_key=pick("input_key", evals.eval_input_key, data.input_key),
        label_key=pick("label_key", evals.eval_label_key, data.label_key),
        tool_key=pick("tool_key", evals.eval_tool_key, data.tool_key),
        metadata_key=pick("metadata_key", data.metadata_key),
        apply_chat_template=pick("apply_chat_template", data.apply_chat_template),
        pass_threshold=pick("pass_threshold", evals.pass_threshold),
        metadata_overrides=own.metadata_overrides,
    )
