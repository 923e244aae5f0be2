"""What the entry point `ray` names. Nothing heavy is imported here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, ClassVar

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.launcher import LauncherDriver, LauncherSetup
from slime_ray.config import RayConfig


class RayDriver(LauncherDriver):
    """On a Ray cluster, an existing one or a private one started for the run: each worker in a process of its own."""

    Config: ClassVar[type[DriverConfig]] = RayConfig

    @classmethod
    def build_launcher(cls, config: RayConfig, setup: LauncherSetup) -> Any:
        from slime_ray.launcher import RayLauncher

        return RayLauncher(config, setup)

    @classmethod
    def problems(cls, config: RayConfig) -> list[str]:
        if find_spec("ray") is None:
            return ['launcher.name = "ray": Ray is not installed: pip install slime-ray.']
        return []
