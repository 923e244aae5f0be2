"""OldArgs: the namespace that old functions read their settings from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_compat.known_flags import ARGS_BY_DEFAULT


class OldArgs:
    """Attributes are what the run file lists, what a plugin adds for the episode, and a few defaults. Nothing can be set: what
    a function changed would be in no record of the run."""

    __slots__ = ("_values", "_where")

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """`where`: the table of the run file that lists more of them, such as `reward.args`."""
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_where", where)

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = object.__getattribute__(self, "_values")
        if name in values:
            return values[name]
        if name in ARGS_BY_DEFAULT:
            return ARGS_BY_DEFAULT[name]
        where = object.__getattribute__(self, "_where")
        raise AttributeError(
            f'args has no "{name}": say {where}.{name} in the run file. Listed: {", ".join(sorted(values)) or "nothing"}.',
            name=name,
            obj=self,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        where = object.__getattribute__(self, "_where")
        raise AttributeError(f"args.{name} cannot be set: say {where}.{name} in the run file.")

    def __dir__(self) -> Iterator[str]:
        return iter(sorted(object.__getattribute__(self, "_values")))

    def __copy__(self) -> OldArgs:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> OldArgs:
        return self
