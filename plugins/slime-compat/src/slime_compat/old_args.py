"""OldArgs: the argument `args` of old functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_compat.known_flags import ARGS_BY_DEFAULT


class OldArgs:
    """Attributes are those that the run file lists, those that a plugin adds for the episode, and a few defaults. They are
    read-only where calls share them, since no record of the run would contain what a function changes."""

    __slots__ = ("_own", "_values", "_where")

    def __init__(self, values: Mapping[str, Any], where: str, *, own: bool = False) -> None:
        """`where`: the table of the run file that lists attributes, such as `reward.args`. own: one call alone has this object,
        so its function may set attributes, which nothing else sees."""
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_where", where)
        object.__setattr__(self, "_own", own)

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = object.__getattribute__(self, "_values")
        if name in values:
            return values[name]
        if name in ARGS_BY_DEFAULT:
            return ARGS_BY_DEFAULT[name]
        where = object.__getattribute__(self, "_where")
        raise AttributeError(
            f'args has no "{name}". Set {where}.{name} in the run file. Listed: {", ".join(sorted(values)) or "nothing"}.',
            name=name,
            obj=self,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if object.__getattribute__(self, "_own"):
            object.__getattribute__(self, "_values")[name] = value
            return
        where = object.__getattribute__(self, "_where")
        raise AttributeError(f"args.{name} is read-only. Set {where}.{name} in the run file.")

    def __dir__(self) -> Iterator[str]:
        return iter(sorted(object.__getattribute__(self, "_values")))

    def __copy__(self) -> OldArgs:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> OldArgs:
        return self
