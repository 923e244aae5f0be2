"""Modules that old functions import, with what they import from them.

Found where THUDM's slime is not installed; where it is, these few take the place of its own, since its `post` would ask a
router that this run does not have. Everything else of it is found where it lies.
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
"""Module to its names, each with the module here that has it."""

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
            f"{fullname} is a module of THUDM's slime, which is not installed; slime-compat stands in for "
            f"{', '.join(CONTENT)} alone",
            name=fullname,
        )


def install() -> None:
    """Once in a process, before an old module is imported: it may import these later, inside its functions."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandIns())
