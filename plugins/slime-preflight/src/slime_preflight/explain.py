"""What a key does, its type, its default, and its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from slime_core import groups
from slime_core.config.chosen import chosen_flags
from slime_core.config.flags import Flag, kernel_flags
from slime_core.config.load import merge
from slime_core.errors import ConfigError, near_matches
from slime_core.registry import Registry
from slime_core.registry.options import default_text, type_text

TABLES: Final = {
    groups.BACKENDS: ("backend", "name"),
    groups.ENGINES: ("engine", "name"),
    groups.ALGORITHMS: ("algo", "name"),
    groups.REWARDS: ("reward", "name"),
    groups.GENERATORS: ("generate", "name"),
    groups.SOURCES: ("data", "source"),
    groups.RENDERERS: ("data", "renderer", "name"),
    groups.COLLECTORS: ("rollout", "collector", "name"),
    groups.TRANSPORTS: ("sync", "transport"),
    groups.LAUNCHERS: ("launcher", "name"),
    groups.OPTIMIZERS: ("train", "optimizer", "name"),
}
"""Groups whose options are listed where nothing is chosen, with the key that chooses one."""


def explain_key(key: str, chosen: Mapping[str, str], plugin_files: Sequence[Path] = ()) -> str:
    """`key` as a dotted path, a bare name, or a flag. With nothing chosen, all installed plugins are searched."""
    name = key.removeprefix("--")
    flags = all_flags(chosen, plugin_files)
    spelled = name.replace("-", "_")
    found = [flag for flag in flags if name in (flag.name, ".".join(flag.path)) or spelled == ".".join(flag.path)]
    found = found or [flag for flag in flags if spelled == flag.path[-1]]
    if not found:
        known = sorted({".".join(flag.path) for flag in flags} | {flag.name for flag in flags})
        close = near_matches(name, known)
        matched = f"; close match: {', '.join(close)}" if close else ""
        raise ConfigError(f"{key}: unknown key{matched}. `slime config explain` lists every key.")
    return "\n\n".join(described(flag) for flag in found)


def described(flag: Flag) -> str:
    doc = " ".join((flag.field.description or "no description").split())
    return (
        f"{'.'.join(flag.path)}\n  flag     --{flag.name}\n  type     {type_text(flag.field)}\n"
        f"  default  {default_text(flag.field)}\n  owner    {flag.owner}\n  {doc}"
    )


def list_keys(chosen: Mapping[str, str], plugin_files: Sequence[Path] = ()) -> str:
    flags = sorted(all_flags(chosen, plugin_files), key=lambda flag: (flag.path, flag.owner))
    width = max(len(".".join(flag.path)) for flag in flags)
    return "\n".join(
        f"{'.'.join(flag.path):{width}}  {' '.join((flag.field.description or '').split())}" for flag in flags
    )


def all_flags(chosen: Mapping[str, str], plugin_files: Sequence[Path] = ()) -> list[Flag]:
    """The kernel's flags, and those of the chosen plugins (of every one that can be used, if none is chosen)."""
    registry = Registry.from_environment(plugin_files)
    flags = kernel_flags()
    if chosen:
        return flags + chosen_flags(chosen, registry, strict=True)
    for group, path in TABLES.items():
        for entry in registry.entries(group):
            # A broken plugin must not hide the keys of all others.
            more = chosen_flags(merge({}, [(path, entry.qualified)]), registry)
            flags += [flag for flag in more if flag not in flags]
    return flags
