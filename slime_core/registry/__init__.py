"""Which one? Names in the config, looked up in entry-point groups: listed without import, resolved one at a time."""

from slime_core.entry import Entry
from slime_core.registry.options import bind
from slime_core.registry.registry import Registry, Status
from slime_core.registry.resolved import Resolved

__all__ = ["Entry", "Registry", "Resolved", "Status", "bind"]
