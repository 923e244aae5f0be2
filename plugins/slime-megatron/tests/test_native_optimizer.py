"""Optimizers that Megatron can step with, and its learning rates."""

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


@pytest.mark.megatron
def test_a_warm_up_may_be_a_share_of_the_decay():
    import torch

    from slime_megatron.optimizer import make_schedule, set_step

    def rates(steps, **keys):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        schedule = make_schedule(optimizer, OptimizerConfig(lr=1.0, lr_decay_style="linear", **keys), total_steps=8)
        found = []
        for step in steps:
            set_step(schedule, step)
            found.append(optimizer.param_groups[0]["lr"])
        return pytest.approx(found, abs=1e-6)

    assert rates([0, 1, 2, 5, 8], lr_warmup_fraction=0.25) == [0, 0.5, 1, 0.5, 0]
    assert rates([0, 1, 4], lr_warmup_fraction=0.25, lr_decay_iters=4) == [0, 1, 0]
    # Of 1.5 steps: two thirds, then 6 and 3 of the 6.5 steps that are left.
    assert rates([1, 2, 5], lr_warmup_fraction=0.1875) == [2 / 3, 6 / 6.5, 3 / 6.5]
    assert rates([2, 7.6, 8], lr_warmup_fraction=0.9) == [2 / 7.2, 0.5, 0]
