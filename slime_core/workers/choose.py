"""Which launcher, and which device."""

from __future__ import annotations

from slime_core.config.run import LauncherConfig
from slime_core.errors import ConfigError
from slime_core.workers.launcher import Launcher


def build_launcher(config: LauncherConfig) -> Launcher:
    """Launchers are two built-ins, imported when chosen."""
    match config.name:
        case "local":
            from slime_core.workers.local import LocalLauncher

            return LocalLauncher()
        case "ray":
            try:
                from slime_ray.launcher import RayLauncher
            except ModuleNotFoundError as error:
                if error.name != "ray":
                    raise
                raise ConfigError(
                    'launcher.name = "ray": Ray is not installed. Type: pip install "slime-rl[ray]".'
                ) from error

            return RayLauncher(config)


def choose_device(asked: str) -> str:
    """cpu or cuda; ConfigError if cuda is asked for and there is none."""
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError('launcher.device = "cuda": torch sees no CUDA device here. Say --device cpu.')
    return asked
