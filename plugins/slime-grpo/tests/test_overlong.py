"""overlong against the piecewise formula of the paper, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from slime_core.types.batch import Batch
from slime_grpo.plugin import Overlong


def make_batch(response_length, mask=None):
    response_length = np.asarray(response_length, np.int32)
    count, response = len(response_length), int(response_length.sum())
    return Batch(
        index=np.arange(count),
        group_index=np.zeros(count, np.int64),
        rollout_id=np.arange(count),
        credit_key=np.zeros(count, np.int64),
        reward=np.zeros(count),
        truncated=np.zeros(count, bool),
        prompt_length=np.ones(count, np.int32),
        response_length=response_length,
        tokens=np.zeros(response + count, np.int32),
        mask=np.ones(response, np.uint8) if mask is None else np.asarray(mask, np.uint8),
        rollout_log_probs=np.zeros(response, np.float32),
        version=np.zeros(response, np.int32),
    )


def test_penalty_by_hand(part):
    # Limit 10, buffer 4: free up to 6, then a quarter more per token, -1 from 10 on (12: tool tokens came on top).
    shaper = part("slime.advantages", "overlong", overlong_buffer_len=4)
    lengths = [0, 1, 6, 7, 8, 9, 10, 12]
    rewards = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, -1.0])
    before = rewards.copy()
    shaped = shaper.shape(rewards, make_batch(lengths), 10)
    np.testing.assert_allclose(shaped, [1.0, 1.0, 0.0, 0.75, 0.5, -0.75, 0.0, -2.0], rtol=0, atol=1e-15)
    np.testing.assert_array_equal(rewards, before)


def test_factor_and_trainable_length(part):
    shaper = part("slime.advantages", "overlong", overlong_buffer_len=2, overlong_penalty_factor=0.5)
    # Four tokens each; the second has two trainable ones, the third none.
    shaped = shaper.shape(np.ones(3), make_batch([4, 4, 4], [1] * 4 + [1, 0, 1, 0] + [0] * 4), 4)
    np.testing.assert_allclose(shaped, [0.5, 1.0, 1.0], atol=1e-15)


def test_a_missing_reward_stays_missing(part):
    shaped = part("slime.advantages", "overlong", overlong_buffer_len=1).shape(
        np.array([np.nan, 1.0]), make_batch([5, 5]), 5
    )
    assert np.isnan(shaped[0])
    assert shaped[1] == 0.0


@pytest.mark.parametrize("limit", [16, 4096])
def test_a_buffer_as_long_as_the_limit_is_a_problem(limit):
    (problem,) = Overlong.problems(Overlong.Config(), limit)
    assert "overlong_buffer_len = 4096" in problem
    assert f"rollout_max_response_len = {limit}, " in problem
    assert Overlong.problems(Overlong.Config(), 4097) == []
