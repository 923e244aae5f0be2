"""Reward shapers, before the advantage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slime_core.contracts.example import ShapingExample
from slime_core.types.batch import Batch, Float64
from slime_plugin_kit.batches import ORDER, example_batch
from slime_plugin_kit.case import Case
from slime_plugin_kit.compare import require_same
from slime_plugin_kit.trial import Trial

MAX_RESPONSE_LEN = 1 << 20
"""Longer than any buffer that a shaper counts from its end; examples go to where it matters."""


@pytest.fixture
def batch() -> Batch:
    return Trial.fresh().batch


def shaped(case: Case, batch: Batch, max_response_len: int = MAX_RESPONSE_LEN) -> Float64:
    got: Float64 = case.build().shape(batch.reward, batch, max_response_len)
    assert got.shape == batch.reward.shape, f"rewards have shape {got.shape}, not {batch.reward.shape}"
    return got


def trials(case: Case, batch: Batch) -> list[tuple[Batch, int]]:
    """The trial batch, and those of examples, which come close to its limits."""
    examples = case.examples(ShapingExample)
    return [(batch, MAX_RESPONSE_LEN), *((example_batch(e.samples), e.max_response_len) for e in examples)]


def test_examples_are_met(case: Case) -> None:
    for of in case.subject.cases:
        for example in of.examples(ShapingExample):
            got = shaped(of, example_batch(example.samples), example.max_response_len)
            require_same(f"rewards with {of.label or 'its defaults'}", got, example.rewards, tolerance=1e-6)


def test_missing_rewards_stay_missing(case: Case, batch: Batch) -> None:
    for there, limit in trials(case, batch):
        for missing in range(there.num_samples):
            reward = there.reward.copy()
            reward[missing] = np.nan
            got = shaped(case, replace(there, reward=reward), limit)
            wrong = np.flatnonzero(np.isnan(got) != np.isnan(reward))
            assert not len(wrong), f"samples {wrong.tolist()}: rewards {reward[wrong]} become {got[wrong]}"


def test_packing_and_order_change_nothing(case: Case, batch: Batch) -> None:
    for there, limit in trials(case, batch):
        order = np.array([sample for sample in ORDER if sample < there.num_samples])
        got = shaped(case, there.take(order), limit)
        require_same(f"samples in the order {order.tolist()}", got, shaped(case, there, limit)[order], tolerance=1e-12)


def test_inputs_are_left_alone(case: Case, batch: Batch) -> None:
    for there, limit in trials(case, batch):
        there.reward.flags.writeable = False
        there.mask.flags.writeable = False
        require_same("called twice", shaped(case, there, limit), shaped(case, there, limit), tolerance=0)
