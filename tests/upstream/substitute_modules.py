"""Substitutes for packages that launch lines of upstream need, where they are not installed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any, Final

PACKAGES: Final = ("mooncake", "strands", "strands_sglang", "tau_bench")
WITH_TORCHVISION: Final = ("sglang_tool_parser",)
"""Modules of examples that import SGLang and with it torchvision, of which there may be no build for this torch."""


class Anything:
    """A class to derive from, and objects with any attribute."""

    def __init__(self, *words: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return None


class Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {}) if name[0].isupper() else decorated


def decorated(function: Any = None, *words: Any, **options: Any) -> Any:
    return function


class ModuleLoader(Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Finder(MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(f"{fullname}.".startswith(f"{name}.") for name in self._names):
            return None
        return importlib.machinery.ModuleSpec(fullname, ModuleLoader(), is_package=True)


def install() -> None:
    """Packages that are installed are used."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.insert(0, Finder(WITH_TORCHVISION))
    sys.meta_path.append(Finder(PACKAGES))
