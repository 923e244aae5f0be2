"""Imports the object of one entry point, through stevedore. No other module imports stevedore."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from stevedore.driver import DriverManager

from slime_core.errors import PluginError
from slime_core.registry.entry import KERNEL, OLD_KERNEL, Entry


class _OneEntryPoint(DriverManager):  # type: ignore[misc]  # stevedore is not followed by mypy
    """A stevedore manager of one entry point from importlib.metadata.

    stevedore's own list comes from a cache on disk that compares modification times as float32, in steps of 128 s:
    it misses plugins that were just installed, keeps old targets, and holds no distribution, so that asking for one of
    two equal names would import both.
    """

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        super().__init__(point.group, point.name)

    def list_entry_points(self) -> list[EntryPoint]:
        return [self._point]


def load(entry: Entry, point: EntryPoint, *, where: str) -> Any:
    """The object that the entry point names. PluginError, with the cause chained, if it cannot be imported."""
    if entry.is_old:
        raise PluginError(f"{where}: {old_kernel_problem(entry)}")
    try:
        return _OneEntryPoint(point).driver
    # Whatever a plugin's import raises is reported with its provenance. stevedore lets failed asserts pass its
    # callback, and a plugin that calls sys.exit would end the program without an error.
    except (Exception, SystemExit) as error:
        raise PluginError(f"{where}: {import_failure(entry, error)}") from error


def old_kernel_problem(entry: Entry) -> str:
    """The sentence for a plugin that was built for 0.1: why it is not imported and what to upgrade; without a full stop."""
    return (
        f"{entry.name} of {entry.provenance} was built for slime 0.1: {entry.dist} requires {OLD_KERNEL}, and the kernel is "
        f"{KERNEL} now ({OLD_KERNEL} on PyPI is another project). Upgrade {entry.dist} to a version that requires {KERNEL}, "
        "or ask its author for one"
    )


def import_failure(entry: Entry, error: BaseException) -> str:
    """The sentence for a plugin that cannot be imported, with the cause and the fix; without a full stop."""
    given = f"{entry.name} of {entry.provenance} ({entry.target}) cannot be imported"
    if isinstance(error, ModuleNotFoundError) and error.name:
        if f"{entry.module}.".startswith(f"{error.name}."):
            return f"{given}: its own module {error.name} is missing. Reinstall {entry.dist}"
        return (
            f"{given}: the module {error.name} is missing. Install it, or reinstall {entry.dist} with its dependencies"
        )
    return f"{given}: {type(error).__name__}: {error}. Upgrade {entry.dist}, or uninstall it"
