"""Stubs of compiled packages that SGLang imports on every machine and never calls on a CPU.

Each name of such a package is a class that can be imported, subclassed and has attributes, and that raises when it is
called: code that needs the real package fails at once, with its name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

PACKAGES: Final = ("torchvision", "sgl_kernel")
"""Wheels of the first are built for one torch version; the second holds CUDA kernels."""


class StubType(type):
    """A class whose attributes are stubs again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__module__}.{cls.__qualname__} is a stub of slime-sglang: on a CPU it is imported, but cannot be "
            "called. Install the real package if you need it."
        )


def stub(module: str, name: str) -> StubType:
    return StubType(name, (), {"__module__": module})


class StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = stub(self.__name__, name)
        setattr(self, name, made)
        return made


class StubFinder(MetaPathFinder, Loader):
    """Finds the packages, and all modules in them, that are not installed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(packages)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        # transformers compares the version.
        vars(module)["__version__"] = "0"


def install_stubs() -> None:
    """Installs stubs of those `PACKAGES` that are missing."""
    missing = [name for name in PACKAGES if name not in sys.modules and PathFinder.find_spec(name) is None]
    if missing:
        sys.meta_path.append(StubFinder(missing))
