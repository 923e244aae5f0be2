"""A batch that teaches the policy nothing is reported, for algorithms with and without groups, and the console prints it once
for each stretch of such steps."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slime_core.algorithm.learning_signal import no_signal
from slime_core.cli.console import Console
from slime_core.contracts.hookspecs import Run, RunEnd, StepTrained
from slime_core.types.batch import TokenColumns
from slime_core.types.report import TrainReport

STEP = {"grad_norm": 0.25, "lr-pg_0": 1e-6, "skipped_steps": 0.0}
FLAT = STEP | {"grad_norm": 0.0}


@pytest.fixture
def batch(make_batch):
    """Two groups of two samples; the rewards of one are equal."""
    return make_batch([(1, 2)] * 4, group=[0, 0, 1, 1], reward=[1.0, 1.0, 0.0, 1.0])


def credit(batch, value):
    return TokenColumns(advantages=np.full(len(batch.mask), value, np.float32))


def test_a_gradient_of_zero_teaches_nothing(batch):
    assert no_signal(batch, credit(batch, 1.0), [STEP]) is None
    # One of the optimizer steps had a gradient.
    assert no_signal(batch, credit(batch, 1.0), [FLAT, STEP]) is None
    clipped = FLAT | {"pg_clipfrac": 1.0}
    assert no_signal(batch, credit(batch, 1.0), [FLAT, clipped]) == (
        "the gradient is 0 (50% of the groups have equal rewards, 100% of the tokens are clipped, learning rate 1e-06)"
    )
    # A gradient of NaN is another matter, which is reported elsewhere.
    assert no_signal(batch, credit(batch, 0.0), [FLAT | {"grad_norm": np.nan, "skipped_steps": 1.0}]) is None


def test_only_other_terms_of_the_loss_have_a_gradient(batch):
    equal = replace(batch, reward=np.ones(4))
    assert no_signal(equal, credit(batch, 0.0), [STEP]) == (
        "all advantages are 0, so only other terms of the loss, such as KL and entropy, have a gradient (100% of the groups "
        "have equal rewards, learning rate 1e-06)"
    )


def test_losses_without_advantages_or_groups_are_judged_by_the_gradient(batch):
    without = replace(batch, reward=np.full(4, np.nan))
    assert no_signal(without, TokenColumns(), [STEP]) is None
    assert no_signal(without, TokenColumns(), [FLAT]) == "the gradient is 0 (learning rate 1e-06)"
    # Equal rewards in every group, as with a critic whose advantages differ between tokens.
    equal = replace(batch, reward=np.ones(4))
    assert no_signal(equal, credit(batch, 0.5), [STEP]) is None


def test_a_batch_without_a_trained_token(batch):
    masked = replace(batch, mask=np.zeros_like(batch.mask))
    assert no_signal(masked, credit(batch, 0.0), [FLAT]) == (
        "none of 4 samples has a token to train: their responses are empty, masked or removed"
    )


def test_the_console_prints_a_stretch_once_and_where_it_ends(capsys):
    algo = SimpleNamespace(uses_rewards=False)
    console = Console(SimpleNamespace(algo=algo), quiet=False)
    run = Run(name="r", run_dir=Path(), config={})
    for step, why in enumerate([None, "the gradient is 0 (x)", "the gradient is 0 (y)", None, "z", "z", "z"]):
        report = TrainReport(version=step, steps=({},), rollout={}, perf={}, no_signal=why)
        console.step_trained(StepTrained(run=run, rollout_id=step, report=report))
    console.run_end(RunEnd(run=run, rollout_id=7, version=7, error=None))
    lines = [line for line in capsys.readouterr().out.splitlines() if "trained" not in line]
    assert [line.partition(":")[0] for line in lines] == [
        "step 1 teaches nothing",
        "step 3 teaches something again, after 2 without",
        "step 4 teaches nothing",
        "the last 3 steps taught nothing",
    ]
    assert "the gradient is 0 (x). Weight decay" in lines[0]
