"""Which of Megatron's own optimizers stands for the one that a run chose."""

from __future__ import annotations

from typing import Final

from slime_core.contracts.optimizer import OptimizerDriver
from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import ConfigError

NATIVE: Final = ("adam", "sgd")


def native_name(setup: TrainerSetup) -> str:
    """Megatron's name of it. ConfigError if Megatron has no such optimizer."""
    chosen = setup.chosen_optimizer
    name = setup.optimizer.optimizer if chosen is None else chosen.driver.native
    if name not in NATIVE:
        raise ConfigError(refusal(setup.optimizer.optimizer))
    return name


def optimizer_problems(name: str, optimizer: type[OptimizerDriver]) -> list[str]:
    """What keeps Megatron from stepping with it; empty if nothing does."""
    return [] if optimizer.native in NATIVE else [refusal(name)]


def refusal(name: str) -> str:
    return (
        f'train.optimizer = "{name}": backend megatron steps with Megatron\'s own optimizers, and has {" and ".join(NATIVE)}. '
        "Use one of them, or a backend that takes any optimizer, such as fsdp."
    )
