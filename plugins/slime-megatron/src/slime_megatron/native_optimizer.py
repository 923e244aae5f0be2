"""Maps the optimizer that a run chose to one of Megatron's own."""

from __future__ import annotations

from typing import Final

from slime_core.contracts.optimizer import OptimizerDriver
from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import ConfigError

NATIVE: Final = ("adam", "sgd")


def native_name(setup: TrainerSetup) -> str:
    """Returns Megatron's name of the chosen optimizer. Raises ConfigError if Megatron has no such optimizer."""
    chosen = setup.chosen_optimizer
    name = setup.optimizer.optimizer if chosen is None else chosen.driver.native
    if name not in NATIVE:
        raise ConfigError(refusal(setup.optimizer.optimizer))
    return name


def optimizer_problems(name: str, optimizer: type[OptimizerDriver]) -> list[str]:
    """Why Megatron cannot step with this optimizer; empty if it can."""
    return [] if optimizer.native in NATIVE else [refusal(name)]


def refusal(name: str) -> str:
    return (
        f'train.optimizer = "{name}": backend megatron steps with Megatron\'s own optimizers, and has {" and ".join(NATIVE)}. '
        "Set one of them, or use a backend that supports any optimizer, such as fsdp."
    )
