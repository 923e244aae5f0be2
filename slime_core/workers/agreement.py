"""Agreement: checks that a worker has the same plugins as the driver."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_core import __version__
from slime_core.config.part import BoundPlugin, PluginSpec
from slime_core.errors import PluginError
from slime_core.registry import Registry
from slime_core.registry.plugin_file import PluginFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The plugins that the driver resolved; every worker resolves them again and compares versions."""

    slime_core: str
    versions: Mapping[str, str]
    """`group:dist/name` to version."""
    plugin_files: tuple[PluginFile, ...]

    @classmethod
    def of(cls, parts: Sequence[BoundPlugin], plugin_files: Sequence[PluginFile]) -> Agreement:
        return cls(
            slime_core=__version__,
            versions={key_of(part): part.entry.version for part in parts},
            plugin_files=tuple(plugin_files),
        )

    def registry(self) -> Registry:
        """The worker's own registry, with the driver's single-file plugins."""
        if self.slime_core != __version__:
            raise PluginError(
                f"{socket.gethostname()} has slime-rl {__version__}, the driver {self.slime_core}: install the same "
                "version on every machine."
            )
        return Registry(self.plugin_files)

    def resolve(self, spec: PluginSpec, registry: Registry) -> BoundPlugin:
        """The part, from this machine's installation. PluginError if it is another version than the driver's."""
        part = spec.resolve(registry)
        expected = self.versions.get(key_of(part))
        if expected != part.entry.version:
            raise PluginError(
                f"{socket.gethostname()} has {part.entry.dist} {part.entry.version}, the driver {expected}: install the "
                "same version on every machine."
            )
        return part


def key_of(part: BoundPlugin) -> str:
    return f"{part.group}:{part.entry.dist}/{part.entry.name}"
