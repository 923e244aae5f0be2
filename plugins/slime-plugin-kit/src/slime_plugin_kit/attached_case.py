"""The engine suite on a server that all tests of a session share: starting one takes half a minute and more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_core.contracts.engine import EngineDriver, RolloutEngine
from slime_plugin_kit.model_kinds import ENGINES
from slime_plugin_kit.suites import engines


@dataclass(frozen=True, eq=False)
class AttachedCase:
    """What the engine suite reads of a case. `build`: returns an engine, not started, on a server whose weights are those of
    the model's folder, with the version that it started with."""

    driver: type[EngineDriver]
    build: Callable[..., RolloutEngine]

    def keep(self, name: str, model: Path) -> None:
        """Runs one property of the suite. AssertionError if the engine breaks it."""
        suite: Any = engines
        getattr(suite, f"test_{name}")(self, model)


def properties_of(driver: type[EngineDriver]) -> tuple[list[str], list[str]]:
    """Names of the properties of an engine, and of those that are about a capability that its driver does not declare."""
    declared: Any = SimpleNamespace(driver=driver)
    names: tuple[list[str], list[str]] = ([], [])
    for prop in ENGINES.properties:
        names[0 if prop.applies(declared) else 1].append(prop.name)
    return names
