"""Manifest: the config, plugins and data of a run. Its fingerprint decides whether two starts are the same run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from slime_core import __version__
from slime_core.config.bound import BoundRun
from slime_core.config.earlier_keys import KeyPath
from slime_core.config.part import BoundPlugin
from slime_core.config.roles import LOSS_KEYS, POLICY
from slime_core.contracts.optimizer import OptimizerKeys
from slime_core.controller.earlier_names import RENAMES, Renames, in_todays_names
from slime_core.errors import PluginError


def key_paths(*keys: str) -> tuple[KeyPath, ...]:
    """`train.lr` as ("train", "lr")."""
    return tuple(tuple(key.split(".")) for key in keys)


OPERATION: Final = key_paths(
    "runs_dir", "prepare", "trackers", "debug", "rollout.dump_rollouts", "rollout.reward_workers", "rollout.reward_timeout",
    "rollout.reward_retries", "rollout.rollout_workers", "rollout.rollout_worker_timeout", "rollout.use_fault_tolerance",
    "rollout.rollout_health_check_interval", "rollout.rollout_health_check_timeout", "rollout.rollout_health_check_first_wait",
    "rollout.max_engine_restarts", "rollout.engine_restart_window", "rollout.engine_call_timeout", "train.rank_call_timeout",
    "router.middleware_timeout",
)  # fmt: skip
"""Keys of how a run is watched, logged and kept alive."""

MAY_CHANGE: Final = OPERATION + key_paths(
    "checkpoint", "train.num_rollout", "train.num_epoch", "data.on_bad_row", "data.max_unknown_share", "eval"
)
"""Keys that a resumed run may change: they alter what is logged or how long it continues, not what is trained."""

RESUME_MAY_CHANGE: Final = (
    *key_paths(
        "name", "train.max_skipped_steps", "train.on_nonfinite", "train.on_short_batch", "train.max_tokens_per_gpu",
        "train.log_probs_max_tokens_per_gpu", "train.micro_batch_size", "rollout.concurrency", "rollout.max_retries",
        "rollout.max_filtered_groups", "rollout.on_exhausted", "rollout.on_failed_group", "rollout.on_reward_failure",
        "rollout.on_reward_error", "rollout.on_reward_timeout", "rollout.on_reward_infra",
    ),
    *((*table, key) for key in OptimizerKeys.model_fields for table in (("train",), *(("roles", role) for role in LOSS_KEYS))),
)  # fmt: skip
"""Keys that `--resume FOLDER` may change beside those, after a run diverged, failed too often or had too little memory."""

REPLAY_MAY_CHANGE: Final = OPERATION + key_paths(
    "name", "plugin", "required_plugins", "checkpoint.keep_checkpoints", "checkpoint.async_save", "checkpoint.save_hf"
)
"""Keys that the replay of a schedule may change. The number of steps, the checkpoints and the evaluations must be equal: they
decide when groups are admitted, aborted and queued, and a replay waits for the recorded events. Single-file plugins are
compared by their text."""

LIBRARIES: Final = ("torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Written to manifest.json when a run starts."""

    slime_core: str
    python: str
    libraries: Mapping[str, str]
    plugins: Mapping[str, str]
    """Table and name in the run file, to `group:dist/name version`."""
    plugin_files: Mapping[str, str]
    """Single-file plugins and the hash of their text."""
    trust_remote_code: bool
    data: str
    """Fingerprint of the training data."""
    config: Mapping[str, Any]
    """The resolved config, with every option of every plugin."""
    fingerprint: str
    may_differ: tuple[KeyPath, ...] = ()
    """Keys that a start with --resume may change: the name, the optimizer's, placement and layout of the roles."""
    accepted_changes: Sequence[Mapping[str, Any]] = ()
    """What --accept-changes accepted: {time, user, host, rollout_id, changes: [{kind, what, old, new}]}, oldest first."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True)


def resolved_config(run: BoundRun) -> dict[str, Any]:
    """The resolved run file: defaults filled in, plugin options bound."""
    config: dict[str, Any] = run.config.model_dump(mode="json")
    config |= {"backend": table(run.backend), "engine": table(run.engine), "generate": table(run.generate)}
    rewards = [table(reward.part) for reward in run.rewards]
    if run.config.rewards:
        own = ("weight", "label", "reward_key")
        config["rewards"] = [
            {**options, **{key: getattr(asked, key) for key in own}}
            for options, asked in zip(rewards, run.config.rewards, strict=True)
        ]
    else:
        config["reward"] = rewards[0] if rewards else None
    algo = run.algo
    config["algo"] = {"name": algo.name, **algo.keys.model_dump(mode="json")} | {
        "advantage": algo.advantage and table(algo.advantage),
        "advantage_terms": [table(part) for part in algo.advantage_terms],
        "loss": table(algo.loss),
        "shaping": [table(part) for part in algo.shaping],
        "corrections": [table(part) for part in algo.corrections],
    }
    if algo.critic_loss is not None:
        config["algo"]["critic_loss"] = table(algo.critic_loss)
    for role, part in run.optimizers.items():
        of_role = config["train"] if role == POLICY else config["roles"][role]
        of_role["optimizer"] = name_or_table(part)
    for role, part in run.role_backends.items():
        config["roles"][role]["backend"] = table(part)
    config["launcher"] |= options_of(run.launcher)
    config["data"] |= {**options_of(run.source), "renderer": name_or_table(run.renderer)}
    config["rollout"]["collector"] = table(run.collector)
    config["rollout"]["filters"] = [table(part) for part in run.filters]
    config["train"]["global_batch_size"] = run.global_batch_size
    return config


def options_of(part: BoundPlugin) -> dict[str, Any]:
    options: dict[str, Any] = part.config.model_dump(mode="json")
    return options


def table(part: BoundPlugin) -> dict[str, Any]:
    return {"name": part.name, **options_of(part)}


def name_or_table(part: BoundPlugin) -> str | dict[str, Any]:
    """Its name alone, if it has no options."""
    return table(part) if options_of(part) else part.name


def build_manifest(run: BoundRun, *, data_fingerprint: str) -> Manifest:
    config = resolved_config(run)
    files = {file.path.name: file.sha256 for file in run.registry.plugin_files}
    plugins = {
        f"{part.where} {part.name}": f"{part.group}:{part.entry.qualified} {part.entry.version}" for part in run.parts
    }
    return Manifest(
        slime_core=__version__,
        python=platform.python_version(),
        libraries={name: importlib.metadata.version(name) for name in LIBRARIES},
        plugins=plugins,
        plugin_files=files,
        trust_remote_code=run.config.model.trust_remote_code,
        data=data_fingerprint,
        config=config,
        fingerprint=fingerprint_of(config, plugins, files, data_fingerprint),
        may_differ=(*MAY_CHANGE, *RESUME_MAY_CHANGE, *layout_keys(run)),
    )


def fingerprint_of(
    config: Mapping[str, Any], plugins: Mapping[str, str], plugin_files: Mapping[str, str], data: str
) -> str:
    """Hash of what is equal in two starts of one run."""
    content = {
        "config": without(config, MAY_CHANGE),
        "plugins": sorted(set(deciding_plugins(plugins).values())),
        "plugin_files": plugin_files,
        "data": data,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def deciding_plugins(plugins: Mapping[str, str]) -> dict[str, str]:
    """The plugins that decide the results: not trackers, evaluation or the launcher."""
    return {where: name for where, name in plugins.items() if not where.startswith(("trackers", "eval", "launcher"))}


def recorded_manifest(content: Mapping[str, Any], renames: Renames = RENAMES) -> dict[str, Any]:
    """The content of a manifest.json under current names. If names changed, its fingerprint is the one that the current
    version gives the same run."""
    today = in_todays_names(content, renames)
    if today != content and "fingerprint" in content:
        today["fingerprint"] = fingerprint_of(*(today[key] for key in ("config", "plugins", "plugin_files", "data")))
    return today


def replay_identity(manifest: Manifest) -> dict[str, Any]:
    """What must be equal to replay a schedule bit for bit, as JSON: the config's keys, the plugins, the texts of single-file
    plugins and the fingerprint of the data."""
    others = {
        "plugins": {
            where: name for where, name in manifest.plugins.items() if not where.startswith(("trackers", "launcher"))
        },
        "plugin_files": manifest.plugin_files,
        "training_data": manifest.data,
    }
    kept: dict[str, Any] = json.loads(
        json.dumps(without(manifest.config, REPLAY_MAY_CHANGE) | others, sort_keys=True, default=str)
    )
    return kept


def layout_keys(run: BoundRun) -> tuple[KeyPath, ...]:
    """The keys of placement and, as far as the backends can load each other's checkpoints, of the layout."""
    backends: dict[KeyPath, BoundPlugin] = {("backend",): run.backend}
    backends |= {("roles", role, "backend"): part for role, part in run.role_backends.items()}
    options = [(*path, option) for path, part in backends.items() for option in sorted(part.driver.layout_options)]
    return (("launcher",), *options, *serving_keys(run))


def serving_keys(run: BoundRun) -> tuple[KeyPath, ...]:
    """The keys of engines and of the transport to them: what other engines decide is rounding and draws."""
    rows = [("engines", row.name, key) for row in run.served for key in ("engine", "num_gpus", "num_gpus_per_engine")]
    options = [] if run.transport is None else [("sync", option) for option in options_of(run.transport)]
    return (("engine",), ("sync", "transport"), *rows, *options)


def without(config: Mapping[str, Any], paths: tuple[KeyPath, ...]) -> dict[str, Any]:
    """`config` without the keys at these paths."""
    result = dict(config)
    for path in paths:
        if len(path) == 1:
            result.pop(path[0], None)
        elif isinstance(result.get(path[0]), Mapping):
            result[path[0]] = without(result[path[0]], (path[1:],))
    return result


def differing(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, old value, new value) for every key that differs, tables compared key by key."""
    for key in sorted(set(old) | set(new)):
        before, after, path = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differing(before, after, f"{path}.")
        elif before != after:
            yield path, before, after


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for every key that differs."""
    return [f"{key}: {before!r} -> {after!r}" for key, before, after in differing(old, new)]


def check_required(requirements: tuple[str, ...]) -> None:
    """PluginError unless every requirement (`slime-x>=0.1`) is met by what is installed."""
    from packaging.requirements import InvalidRequirement, Requirement

    problems = []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            problems.append(f'required_plugins: "{text}" is not a requirement: {error}.')
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f'required_plugins: {requirement.name} is not installed: pip install "{text}".')
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f'required_plugins: {requirement.name} {version} is installed: pip install "{text}".')
    if problems:
        raise PluginError("\n".join(problems))
