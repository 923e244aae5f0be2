"""The kernel's own launcher, registered like any plugin's."""

from __future__ import annotations

from typing import Any

from slime_core.contracts.launcher import LauncherDriver, LauncherSetup


class LocalDriver(LauncherDriver):
    """In this process: one rank for each trained role, any number of engines."""

    single_process = True

    @classmethod
    def build_launcher(cls, config: Any, setup: LauncherSetup) -> Any:
        from slime_core.workers.local import LocalLauncher

        return LocalLauncher()
