"""slime's kernel: contracts, registries, hooks, the data path and the loop. It knows no plugin by name."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

API_VERSION = 2
"""The version of the contracts in `slime_core.contracts`; every driver states the one it was written for."""

if TYPE_CHECKING:
    from collections.abc import Callable

    open_session: Callable[..., Any]
    run: Callable[..., Any]
else:

    def __getattr__(name: str) -> Any:
        """The library, from the distribution that provides it: imported when a program first uses it."""
        if name not in ("open_session", "run"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # By its name: the registry imports this module.
        registry = importlib.import_module("slime_core.registry").Registry.from_environment()
        where = f"{__name__}.{name}"
        return registry.load(registry.find("slime.library", name, where=where), where=where)
