"""LauncherDriver: starts the workers of a run on one or several machines."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from slime_core.contracts.driver import Driver


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSetup:
    """Settings of the run that a launcher needs beside its own options."""

    colocate: bool = False
    """The policy's trainers and engines, which are started first, share their devices."""
    num_engines: int = 1
    """Number of engines of the policy; those of a teacher or a reward model are not counted."""


class LauncherDriver(Driver[Any]):
    """Chosen by launcher.name. Builds a `slime_core.workers.launcher.Launcher`."""

    single_process: ClassVar[bool] = False
    """True: all workers run in this process: each role has one rank, and engines are on this machine."""

    @classmethod
    def build(cls, config: Any) -> Any:
        return cls.build_launcher(config, LauncherSetup())

    @classmethod
    @abstractmethod
    def build_launcher(cls, config: Any, setup: LauncherSetup) -> Any:
        """Builds the launcher and starts nothing yet. Heavy imports happen here. config: an instance of `cls.Config`."""

    @classmethod
    def problems(cls, config: Any) -> list[str]:
        """Reasons why it cannot start workers on this machine; empty if it can."""
        return []
