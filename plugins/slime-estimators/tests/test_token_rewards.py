"""Rewards where they were earned, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from slime_core.contracts.example import ExampleSample
from slime_estimators.token_rewards import rewards_by_token
from slime_plugin_kit.batches import example_batch

# Of the first response the fourth and fifth token are a tool's. The others: empty, nothing trained, no reward.
SAMPLES = [
    ExampleSample(mask=[1, 1, 1, 0, 0, 1, 1], reward=3.75),
    ExampleSample(mask=[1, 1, 0], reward=2.0),
    ExampleSample(mask=[], reward=1.0),
    ExampleSample(mask=[0, 0], reward=1.0),
    ExampleSample(mask=[1, 1]),
]
OF_OTHERS = [0, 2, 0, 0, 0, 0, 0]


def test_a_reward_is_earned_at_the_last_trained_token():
    batch = example_batch(SAMPLES)
    assert rewards_by_token(batch, batch.reward).tolist() == [0] * 6 + [3.75] + OF_OTHERS
    assert rewards_by_token(batch, 2 * batch.reward).tolist() == [0] * 6 + [7.5] + [2 * value for value in OF_OTHERS]


@pytest.mark.parametrize("of_unscored", [0.0, 0.5])
def test_parts_that_belong_to_spans_are_earned_in_them_and_the_rest_at_the_end(of_unscored):
    token_reward = np.array([0, 0.5, -1.0, 0, 0, 0, 0] + [0] * 5 + [0, of_unscored], np.float32)
    batch = replace(example_batch(SAMPLES), token_reward=token_reward)
    assert rewards_by_token(batch, batch.reward).tolist() == [0, 0.5, -1, 0, 0, 0, 4.25, *OF_OTHERS]
