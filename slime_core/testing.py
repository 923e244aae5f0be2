"""The old name of a package that has left the kernel. Importing it, or a module of it, warns and gives what is there now."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from slime_core.registry.install_hints import MOVED

NEW = MOVED[__name__]


class Moved(MetaPathFinder, Loader):
    """Modules of the package under its old name: the same objects, each loaded once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what `sys.modules` holds after this call.
        sys.modules[module.__name__] = importlib.import_module(f"{NEW}{module.__name__.removeprefix(__name__)}")


warnings.warn(f"{__name__} is {NEW} now; the old name goes with slime-rl 0.3", DeprecationWarning, stacklevel=2)
try:
    package = importlib.import_module(NEW)
except ModuleNotFoundError as error:
    if error.name != NEW:
        raise
    raise ModuleNotFoundError(f"{__name__} is {NEW} now: pip install {NEW.replace('_', '-')}", name=__name__) from None
# First: the folders of the package have these modules too, and would load them a second time.
sys.meta_path.insert(0, Moved())
sys.modules[__name__] = package
