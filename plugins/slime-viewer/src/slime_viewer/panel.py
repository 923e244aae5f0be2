"""Panel: a part of the page that a plugin provides, in the entry-point group `slime.panels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import groups
from slime_core.errors import PluginError
from slime_core.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What an entry of `slime.panels` names."""

    title: str
    """A few words for the menu of a run."""
    data: Callable[[Path], Any]
    """From the folder of a run to what JSON can hold. It is called in a thread, again while a run continues; a file may be
    missing, or be written at the moment."""
    module: str
    """The text of an ES module. Its default export draws: `(element, data) => undefined | (() => void)`; what it returns is
    called before the element is emptied. Text of samples belongs into text nodes, never into HTML."""


@dataclass(frozen=True, slots=True)
class InstalledPanel:
    name: str
    origin: str
    """`dist version`."""
    panel: Panel

    def info(self) -> dict[str, str]:
        return {"name": self.name, "title": self.panel.title, "from": self.origin}


def installed_panels(registry: Registry) -> dict[str, InstalledPanel]:
    """By name. PluginError for an entry that cannot be imported, is no Panel, or has the name of another."""
    found: dict[str, InstalledPanel] = {}
    for entry in registry.entries(groups.PANELS):
        registry.find(groups.PANELS, entry.name, where="panel")
        panel = registry.load(entry, where=f'panel "{entry.name}"')
        if not isinstance(panel, Panel):
            raise PluginError(
                f'panel "{entry.name}" of {entry.provenance} is a {type(panel).__name__}, no slime_viewer.panel.Panel.'
            )
        found[entry.name] = InstalledPanel(entry.name, entry.provenance, panel)
    return found
