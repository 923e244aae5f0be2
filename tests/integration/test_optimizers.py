"""Whole runs with an optimizer from a plugin file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = pytest.mark.usefixtures("tiny_forks")

PLUGIN = '''
from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.optimizer import OptimizerDriver
from slime_core.plugin import driver, reward


@reward("odd")
def odd(sample):
    return float(sample.tokens[-1] % 2)


class SignsConfig(DriverConfig):
    signs_beta: float = Field(0.5, ge=0, lt=1)
    """Decay of the momentum."""


@driver("slime.optimizers", "signs")
class Signs(OptimizerDriver):
    Config = SignsConfig

    @classmethod
    def build(cls, config):
        import torch

        class SignOptimizer(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for weight in group["params"]:
                        state = self.state[weight]
                        if not state:
                            state["step"] = torch.zeros(())
                            state["momentum"] = torch.zeros_like(weight)
                        state["step"] += 1
                        state["momentum"].lerp_(weight.grad, 1 - config.signs_beta)
                        weight.sub_(state["momentum"].sign(), alpha=group["lr"] / state["step"].item())

        return lambda groups, keys, rounded: SignOptimizer(groups, {"lr": keys.lr})
'''
WORDS = ("--plugin", "signs.py", "--reward", "odd", "--optimizer", "signs", "--signs-beta", "0.9", "--save-hf")


@pytest.fixture
def signs(tiny: TinyRun) -> TinyRun:
    (tiny / "signs.py").write_text(PLUGIN)
    return tiny


def weights(tiny: TinyRun, run: str) -> dict[str, np.ndarray]:
    return load_file(tiny.runs / run / "hf/model.safetensors")


def test_its_steps_are_the_runs(signs: TinyRun) -> None:
    """The first step of a momentum from zero, by its sign: every weight that has a gradient moves by the learning rate."""
    ended = signs.run(*WORDS, "--name", "one", "--num-rollout", "1", "--lr", "0.125")
    assert ended.code == 0, ended.err
    start, trained = load_file(signs / "base/model.safetensors"), weights(signs, "one")
    moved = np.concatenate([np.abs(trained[name] - start[name]).ravel() for name in trained])
    assert set(np.unique(moved.round(5))) <= {0.0, 0.125}
    assert (moved > 0).mean() > 0.5
    # Its options are the run's: the resolved run file has them.
    text = (signs.runs / "one/config.toml").read_text()
    assert 'name = "signs"' in text
    assert "signs_beta = 0.9" in text


def test_a_resumed_run_ends_with_the_same_bits(signs: TinyRun) -> None:
    whole = signs.run(*WORDS, "--name", "whole", "--num-rollout", "4")
    assert whole.code == 0, whole.err
    for steps in ("2", "4"):
        ended = signs.run(
            *WORDS, "--name", "parts", "--num-rollout", steps, *(["--resume", "runs/parts"] * (steps == "4"))
        )
        assert ended.code == 0, ended.err
    assert signs.steps("train/step", "parts") == signs.steps("train/step", "whole")
    for name, expected in weights(signs, "whole").items():
        np.testing.assert_array_equal(weights(signs, "parts")[name], expected, err_msg=name)


def test_an_unknown_optimizer_is_reported_with_close_matches(signs: TinyRun) -> None:
    ended = signs.run("--optimizer", "adan")
    assert ended.code != 0
    assert 'train.optimizer.name = "adan": unknown optimizer; close match: adam' in ended.error
