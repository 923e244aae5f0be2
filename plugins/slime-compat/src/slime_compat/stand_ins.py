"""Replacements of upstream modules that old functions import.

They are used also where upstream slime is installed: its `post` would call a router that this run does not have. All other
upstream modules are imported from the installed package.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Final

CONTENT: Final[Mapping[str, Mapping[str, str]]] = {
    "slime.utils.types": {"Sample": "slime_compat.old_sample"},
    "slime.utils.http_utils": {"post": "slime_compat.requests", "get": "slime_compat.requests"},
    "slime.rollout.sglang_rollout": {
        "GenerateState": "slime_compat.requests",
        "generate": "slime_compat.written_before",
    },
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": "slime_compat.filter_output"},
}
"""Upstream module -> its names -> the module here that defines them."""

PACKAGES: Final = frozenset({"slime", "slime.utils", "slime.rollout", "slime.rollout.filter_hub"})


class StandInLoader(Loader):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        for name, home in self._names.items():
            setattr(module, name, getattr(importlib.import_module(home), name))


class StandIns(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in CONTENT:
            return importlib.machinery.ModuleSpec(fullname, StandInLoader(CONTENT[fullname]))
        if not fullname.startswith("slime.") and fullname != "slime":
            return None
        if importlib.machinery.PathFinder.find_spec(fullname, path) is not None:
            return None
        if fullname in PACKAGES:
            return importlib.machinery.ModuleSpec(fullname, StandInLoader({}), is_package=True)
        raise ModuleNotFoundError(
            f"{fullname} is a module of upstream slime, which is not installed; slime-compat only replaces "
            f"{', '.join(CONTENT)}",
            name=fullname,
        )


def install() -> None:
    """Installs the import hook, once in a process. It stays, since functions may import these modules when called."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandIns())
