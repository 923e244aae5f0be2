"""Names to drivers: entry points, plugin files, validation of what they load, and observers."""

from slime_core.registry.entry import Entry
from slime_core.registry.options import bind
from slime_core.registry.registry import Registry, Status
from slime_core.registry.resolved import Resolved

__all__ = ["Entry", "Registry", "Resolved", "Status", "bind"]
