"""Loss weights by hand: mask x weight of the rollout / D, with D of the whole optimizer step."""

import numpy as np
import pytest

from slime_core.algorithm.loss_weights import loss_weights, split_steps
from slime_core.contracts.aggregation import Aggregation

L = 10

# Six samples in five rollouts. Rollout 7 is two samples; 8 is fully masked; 5 has an empty response.
LENGTHS = [(1, 3), (2, 2), (1, 4), (3, 2), (2, 0), (1, 1)]
ROLLOUTS = [7, 7, 9, 8, 5, 2]
MASKS = [[1, 0, 1], [1, 1], [1, 1, 1, 1], [0, 0], [], [1]]


@pytest.fixture
def batch(make_batch):
    return make_batch(LENGTHS, rollout_id=ROLLOUTS, masks=MASKS)


def weights(batch, steps, aggregation):
    return loss_weights(batch, np.array(steps), aggregation, L).tolist()


def test_seq_mean_weighs_by_the_trainable_tokens_of_the_whole_rollout(batch):
    # D = 5 rollouts, the fully masked and the empty one among them. Rollout 7: 4 trainable tokens in two samples.
    a, b, c = 1 / 4 / 5, 1 / 4 / 5, 1 / 1 / 5
    expected = [a, 0, a, a, a, b, b, b, b, 0, 0, c]
    assert weights(batch, [0] * 6, Aggregation.SEQ_MEAN) == pytest.approx(expected, rel=1e-7)


def test_token_mean_divides_by_the_trainable_tokens_of_the_step(batch):
    assert weights(batch, [0] * 6, Aggregation.TOKEN_MEAN) == pytest.approx(
        [1 / 9, 0, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 0, 0, 1 / 9], rel=1e-7
    )


def test_constant_divides_by_the_length_limit_and_the_rollouts(batch):
    w = 1 / L / 5
    assert weights(batch, [0] * 6, Aggregation.CONSTANT) == pytest.approx(
        [w, 0, w, w, w, w, w, w, w, 0, 0, w], rel=1e-7
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Step 0: rollouts 7 and 9 (8 tokens). Step 1: 8 and 5 (none). Step 2, short: 2 (1 token).
        (Aggregation.SEQ_MEAN, [1 / 8, 0, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 0, 0, 1]),
        (Aggregation.TOKEN_MEAN, [1 / 8, 0, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 0, 0, 1]),
        (Aggregation.CONSTANT, [1 / 20, 0, *[1 / 20] * 7, 0, 0, 1 / 10]),
    ],
)
def test_every_step_has_its_own_denominator(batch, aggregation, expected):
    assert weights(batch, [0, 0, 0, 1, 1, 2], aggregation) == pytest.approx(expected, rel=1e-7)


def test_a_step_without_a_trainable_token_divides_by_nothing(make_batch):
    batch = make_batch([(1, 2), (1, 0)], masks=[[0, 0], []])
    for aggregation in Aggregation:
        assert weights(batch, [0, 0], aggregation) == [0, 0]


def test_seq_mean_weights_of_a_step_sum_to_the_share_of_rollouts_that_train(batch):
    assert sum(weights(batch, [0] * 6, Aggregation.SEQ_MEAN)) == pytest.approx(3 / 5)


def test_weights_are_float32_and_one_per_response_token(batch):
    column = loss_weights(batch, np.zeros(6, np.int64), Aggregation.SEQ_MEAN, L)
    assert column.dtype == np.float32
    assert column.shape == (12,)


def test_steps_take_rollouts_in_order_of_appearance(batch):
    # 7 | 9, 8 | 5, 2 with two rollouts a step would be 7 9 | 8 5 | 2.
    assert split_steps(batch, 2).tolist() == [0, 0, 0, 1, 1, 2]
    assert split_steps(batch, 5).tolist() == [0] * 6
    assert split_steps(batch, 1).tolist() == [0, 0, 1, 2, 3, 4]


def test_the_samples_of_a_rollout_share_a_step_wherever_they_are(make_batch):
    batch = make_batch([(1, 1)] * 6, rollout_id=[30, 20, 10, 30, 20, 10])
    assert split_steps(batch, 2).tolist() == [0, 0, 1, 0, 0, 1]


def test_no_sample_no_step(make_batch):
    empty = make_batch([])
    assert split_steps(empty, 4).tolist() == []
    assert loss_weights(empty, np.empty(0, np.int64), Aggregation.SEQ_MEAN, L).tolist() == []
