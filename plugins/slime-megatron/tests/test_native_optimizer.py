"""Optimizers that Megatron can step with."""

from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.optimizer import ChosenOptimizer, OptimizerConfig, OptimizerDriver
from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import ConfigError
from slime_megatron.native_optimizer import native_name, optimizer_problems
from slime_training.plugin import AdamDriver, SgdDriver


class Muon(OptimizerDriver):
    """An optimizer that Megatron does not have."""


class MyAdam(OptimizerDriver):
    """AdamW of another distribution, which Megatron has."""

    native = "adam"


SETUP = TrainerSetup(
    role="actor",
    rank=0,
    world_size=1,
    local_rank=0,
    rendezvous="",
    device="cpu",
    model_path=Path(),
    optimizer=OptimizerConfig(optimizer="sgd"),
    total_steps=1,
    seed=0,
)


def test_optimizers_that_megatron_has():
    assert [optimizer_problems("x", driver) for driver in (AdamDriver, SgdDriver, MyAdam)] == [[], [], []]
    (problem,) = optimizer_problems("muon", Muon)
    assert problem.startswith('train.optimizer = "muon": backend megatron')
    assert "adam and sgd" in problem


def test_the_name_is_megatrons():
    assert native_name(SETUP) == "sgd"
    named = replace(SETUP, optimizer=OptimizerConfig(optimizer="my_adam"))
    assert (
        native_name(replace(named, chosen_optimizer=ChosenOptimizer(driver=MyAdam, options=DriverConfig()))) == "adam"
    )
    with pytest.raises(ConfigError, match=r'train\.optimizer = "my_adam"'):
        native_name(named)
    with pytest.raises(ConfigError, match=r'train\.optimizer = "my_adam"'):
        native_name(replace(named, chosen_optimizer=ChosenOptimizer(driver=Muon, options=DriverConfig())))
