"""The names of plugins that can do something, for messages."""

from __future__ import annotations

from slime_core.config.bound import BoundRun
from slime_core.errors import PluginError


def those_with(run: BoundRun, group: str, kind: type) -> str:
    """Of the installed plugins of `group`, those whose drivers are a `kind`; "none that is installed"."""
    found = []
    for entry in run.registry.entries(group):
        try:
            driver = run.registry.resolve(group, entry.qualified, where=group).driver
        except PluginError:
            continue
        if issubclass(driver, kind):
            found.append(entry.name)
    return ", ".join(sorted(found)) or "none that is installed"
