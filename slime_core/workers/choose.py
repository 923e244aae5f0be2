"""Which device the workers are on."""

from __future__ import annotations

from slime_core.errors import ConfigError


def choose_device(asked: str) -> str:
    """The device, cpu or cuda; ConfigError if cuda is requested and there is none."""
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError('launcher.device = "cuda": torch sees no CUDA device here. Pass --device cpu.')
    return asked
