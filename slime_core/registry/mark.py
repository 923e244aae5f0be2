"""Mark: the attribute that the decorators of `slime_core.plugin` set on a function or class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]+")
"""Names of plugins: letters, digits, `-` and `_`."""


class Mark(NamedTuple):
    """Kept as the attribute `__slime__`."""

    group: str
    name: str
    traits: Mapping[str, Any]
    """Class variables for the driver that is made around a plain function, such as `needs`."""


def mark_of(thing: object) -> Mark | None:
    """The mark on `thing` itself, not one that a class inherits."""
    mark = getattr(thing, "__dict__", {}).get("__slime__")
    return mark if isinstance(mark, Mark) else None
