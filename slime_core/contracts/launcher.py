"""LauncherDriver: where the workers of a run are started."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from slime_core.contracts.driver import Driver


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSetup:
    """What a launcher has to know of the run beside its own options."""

    colocate: bool = False
    """The trainers that are started first and the engines that are started first share their devices."""
    num_engines: int = 1
    """Engines of the policy."""


class LauncherDriver(Driver[Any]):
    """Chosen by launcher.name. Builds a `slime_core.workers.launcher.Launcher`."""

    single_process: ClassVar[bool] = False
    """All workers live in this process: each role has one rank, and an engine stays on this machine."""

    @classmethod
    def build(cls, config: Any) -> Any:
        return cls.build_launcher(config, LauncherSetup())

    @classmethod
    @abstractmethod
    def build_launcher(cls, config: Any, setup: LauncherSetup) -> Any:
        """The launcher, with nothing started yet. Heavy imports happen here."""

    @classmethod
    def problems(cls, config: Any) -> list[str]:
        """What keeps it from starting anything on this machine; empty if nothing does."""
        return []
