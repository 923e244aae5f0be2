"""Keys and values of run files under the names that they had in an earlier release. They work until the next minor one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

KeyPath: TypeAlias = tuple[str, ...]
"""A key of the config, table by table: ("train", "lr")."""

RENAMED: Final[Mapping[KeyPath, KeyPath]] = {
    ("rollout", "ahead"): ("rollout", "max_async_level"),
    ("rollout", "reward_choice_key"): ("rollout", "reward_select_key"),
    ("rollout", "on_reward_wrong"): ("rollout", "on_reward_error"),
    ("eval", "eval_on_the_side"): ("eval", "async_eval"),
    ("eval", "eval_holds_weights"): ("eval", "eval_blocks_weight_update"),
}
"""Renamed in 0.2, in the same table; the old names go with 0.3."""

VALUES: Final[Mapping[KeyPath, Mapping[str, str]]] = {
    ("rollout", key): {"leave_out": "mask"}
    for key in ("on_reward_failure", "on_reward_error", "on_reward_timeout", "on_reward_infra")
}
"""Values that were renamed, by the key's new name."""

FLAGS: Final[Mapping[str, str]] = {
    prefix + old.replace("_", "-"): new
    for (table, old), (_, key) in RENAMED.items()
    for prefix, new in (("", key.replace("_", "-")), (f"{table}.", f"{table}.{key}"))
}
"""Old flags, in dashes, to new ones, without dashes in front."""


def current_path(path: Sequence[str]) -> KeyPath:
    return RENAMED.get(tuple(path), tuple(path))


def current_value(path: Sequence[str], value: Any) -> Any:
    return VALUES.get(tuple(path), {}).get(value, value) if isinstance(value, str) else value


def current_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """`tables` under current names. A current name that is there too wins."""
    result = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()}
    for (name, key), (_, current) in RENAMED.items():
        table = result.get(name)
        if isinstance(table, dict) and key in table:
            table.setdefault(current, table.pop(key))
    for name, key in VALUES:
        table = result.get(name)
        if isinstance(table, dict) and key in table:
            table[key] = current_value((name, key), table[key])
    return result


def notices(tables: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """A sentence for each old name in a run file's tables or in the words of a command line."""
    flags = {word.removeprefix("--").partition("=")[0].replace("_", "-").removeprefix("no-") for word in words}
    paths = {word.partition("=")[0] for word in words}
    found = []
    for old, new in RENAMED.items():
        flag, table = old[-1].replace("_", "-"), tables.get(old[0])
        if flag in flags or ".".join(old) in flags | paths or (isinstance(table, Mapping) and old[-1] in table):
            now = f"{'.'.join(new)} (--{new[-1].replace('_', '-')})"
            found.append(f"{'.'.join(old)} (--{flag}) is now {now}; the old name works until 0.3.")
    return found
