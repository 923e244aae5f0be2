"""Earlier names: how folders of runs that began with an earlier release call what is called otherwise now.

An unfinished run continues under a new release if its manifest, read in today's names, is that of the same run. A change
that renames a distribution or a key, or moves a plugin to another distribution, adds a row to `RENAMES`. A row stays as long as
there may be run folders with the old name, and does nothing to manifests that have today's.
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from slime_core.config.earlier_keys import RENAMED, VALUES, KeyPath
from slime_core.registry.install_hints import DISTRIBUTION_OF


@dataclass(frozen=True, slots=True, kw_only=True)
class Renames:
    """Old names to new ones. Every table is one of what a manifest records."""

    entries: Mapping[str, str] = field(default_factory=dict)
    """Plugins that moved or have another name: `group:distribution/name` to the same form."""
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Distributions that were renamed, with every plugin that `entries` does not name."""
    keys: Mapping[KeyPath, KeyPath] = field(default_factory=dict)
    """Keys of the config that were renamed or moved to another table."""
    values: Mapping[KeyPath, Mapping[str, str]] = field(default_factory=dict)
    """Values that were renamed, by the key's new name."""
    added: Mapping[KeyPath, Any] = field(default_factory=dict)
    """Keys that there were not, and the value, as JSON has it, with which today's slime does what was done then."""
    added_beside: Mapping[KeyPath, tuple[str, Any]] = field(default_factory=dict)
    """The same for options of plugins, with another option that tables of these plugins always had."""
    became_plugins: Mapping[KeyPath, Mapping[str, str]] = field(default_factory=dict)
    """Keys, by their new names, whose values (of a table: whose keys) were words of the kernel and are names of plugins now;
    `group:distribution/name` by value."""
    options_of: Mapping[KeyPath, str] = field(default_factory=dict)
    """Keys that a table always had and that are options of one plugin now, by its name: another's table has them no longer."""
    continued: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Beginnings of versions, such as "0.1.", and distributions, by their old names: a run that began with them continues with
    the version that is installed. Versions of other distributions must be equal."""


CONTINUED_0_1: Final = frozenset({"slime-core"}).union(*DISTRIBUTION_OF.values())
"""0.1 was released at one version. A distribution that is new since then, or an extra, has no version of 0.1."""

OPTIMIZERS_0_1: Final = {name: f"slime.optimizers:slime-training/{name}" for name in ("adam", "sgd")}

RENAMES: Final = Renames(
    entries={
        "slime.sources:slime-core/files": "slime.sources:slime-sources/files",
        "slime.collectors:slime-core/accepted": "slime.collectors:slime-sources/accepted",
        "slime.collectors:slime-rl/accepted": "slime.collectors:slime-sources/accepted",
        "slime.collectors:slime-core/pool": "slime.collectors:slime-sources/pool",
        "slime.collectors:slime-core/replay": "slime.collectors:slime-sources/replay",
    }
    | {
        f"slime.transports:slime-sglang/{name}": f"slime.transports:slime-transports/{name}"
        for name in ("delta", "disk", "distributed", "ipc")
    },
    distributions={"slime-core": "slime-rl"},
    keys=RENAMED,
    values=VALUES,
    added={
        ("data", "max_unknown_share"): 0.0,
        ("data", "renderer"): "chat",
        ("train", "rank_call_timeout"): 14_400.0,
        ("router", "middleware_timeout"): 600.0,
        ("train", "lr_warmup_fraction"): None,
        ("roles", "critic", "lr_warmup_fraction"): None,
    },
    added_beside={
        ("generate", "ignored_parameters"): ("fork_threshold", []),
        ("engine", "prefill_options"): ("prefill_servers", {}),
        ("engine", "decode_options"): ("prefill_servers", {}),
        ("engine", "python"): ("prefill_servers", None),
        ("engine", "sleep_level"): ("prefill_servers", None),
        ("reward", "rm_program"): ("rm_model", None),
        ("generate", "sample_hook_paths"): ("missing_log_probs", []),
        ("backend", "hooks"): ("mtp_loss_scaling_factor", None),
        ("roles", "critic", "backend", "hooks"): ("mtp_loss_scaling_factor", None),
        ("sync", "post_write_hook"): ("update_weights_timeout", None),
    },
    became_plugins={
        ("data", "renderer"): {"chat": "slime.renderers:slime-sources/chat"},
        ("train", "optimizer"): OPTIMIZERS_0_1,
        ("roles", "critic", "optimizer"): OPTIMIZERS_0_1,
        ("data", "multimodal_keys"): {name: f"slime.media:slime-models/{name}" for name in ("image", "video")},
    },
    options_of={("launcher", "address"): "ray", ("launcher", "num_cpus_per_worker"): "ray"},
    continued={"0.1.": CONTINUED_0_1},
)


def in_todays_names(content: Mapping[str, Any], renames: Renames = RENAMES) -> dict[str, Any]:
    """The content of a manifest.json with today's names in its config and its plugins. Its fingerprints stay as they are."""
    config = config_today(content.get("config", {}), renames)
    plugins = {where: plugin_today(text, renames) for where, text in content.get("plugins", {}).items()}
    known = {text.rpartition(" ")[0] for text in plugins.values()}
    for path, by_value in renames.became_plugins.items():
        value = found(config, path)
        for name in value if isinstance(value, Mapping) else (str(value),):
            chosen = by_value.get(name)
            if chosen is not None and chosen not in known:
                plugins[f"{'.'.join(path)} {name}"] = f"{chosen} {installed(chosen, '')}"
    may_differ = [list(renames.keys.get(tuple(path), path)) for path in content.get("may_differ", ())]
    today = {"config": config, "plugins": plugins, "may_differ": may_differ}
    return {**content, **{key: value for key, value in today.items() if key in content}}


def plugin_today(text: str, renames: Renames) -> str:
    """`group:distribution/name version` in today's names."""
    entry, _, version = text.rpartition(" ")
    group, _, qualified = entry.partition(":")
    dist, _, name = qualified.rpartition("/")
    moved = renames.entries.get(entry, f"{group}:{renames.distributions.get(dist, dist)}/{name}")
    for beginning, dists in renames.continued.items():
        if version.startswith(beginning) and dist in dists:
            return f"{moved} {installed(moved, version)}"
    return f"{moved} {version}"


def installed(entry: str, otherwise: str) -> str:
    """The version of the distribution of `group:distribution/name`."""
    dist = entry.partition(":")[2].rpartition("/")[0]
    try:
        return importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        return otherwise


def config_today(config: Mapping[str, Any], renames: Renames) -> dict[str, Any]:
    """A new config; the old one is left alone."""
    result = copy.deepcopy(dict(config))
    for old, new in renames.keys.items():
        table = table_at(result, old[:-1])
        if table is not None and old[-1] in table:
            put(result, new, table.pop(old[-1]))
            # A table whose last key has moved is gone too.
            if not table and len(old) > 1:
                tables = table_at(result, old[:-2])
                assert tables is not None
                del tables[old[-2]]
    for path, renamed in renames.values.items():
        table = table_at(result, path[:-1])
        if table is not None and table.get(path[-1]) in renamed:
            table[path[-1]] = renamed[table[path[-1]]]
    for path, name in renames.options_of.items():
        table = table_at(result, path[:-1])
        if table is not None and table.get("name") != name:
            table.pop(path[-1], None)
    for path, value in renames.added.items():
        table = table_at(result, path[:-1])
        if table is not None:
            table.setdefault(path[-1], value)
    for path, (beside, value) in renames.added_beside.items():
        table = table_at(result, path[:-1])
        if table is not None and beside in table:
            table.setdefault(path[-1], value)
    return result


def table_at(config: dict[str, Any], path: KeyPath) -> dict[str, Any] | None:
    """None if there is no such table."""
    value = found(config, path)
    return value if isinstance(value, dict) else None


def found(config: Mapping[str, Any], path: KeyPath) -> Any:
    """The value at a path; None if there is none."""
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def put(config: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Makes the tables on the way."""
    table = config
    for key in path[:-1]:
        if not isinstance(table.get(key), dict):
            table[key] = {}
        table = table[key]
    table[path[-1]] = value
