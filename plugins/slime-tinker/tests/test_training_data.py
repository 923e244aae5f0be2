"""Datums as sent, and what they are for slime."""

import numpy as np
import pytest
import torch
from test_losses import parsed
from tinker import TensorData
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types import Datum, EncodedTextChunk, ImageChunk, ModelInput

from slime_core.registry import Registry
from slime_tinker.errors import RequestError
from slime_tinker.training import trained_outcome


def datum(tokens, **inputs):
    return Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def array(values):
    return TensorData.from_numpy(np.asarray(values))


def policy(tokens, targets, old, advantages, **inputs):
    return datum(tokens, target_tokens=targets, logprobs=old, advantages=advantages, **inputs)


def test_targets_that_are_the_next_tokens_make_one_text():
    data = parsed([datum([3, 4, 5], target_tokens=[4, 5, 6], weights=[0.0, 0.5, -2.0])], "cross_entropy", {})
    (own,) = data.datums
    assert own.tokens.tolist() == [3, 4, 5, 6]
    assert own.prompt_length == 1
    assert own.loss_weights.tolist() == [0.0, 0.5, -2.0]
    assert data.num_tokens == 3


def test_targets_of_zero_in_a_prompt_are_its_prompt():
    """As rl_loop sends them; 0 happens to be the second token, and that one counts as a target."""
    data = parsed([policy([7, 8, 0, 5], [0, 0, 5, 6], [0.0, 0.0, -1.0, -2.0], [0.0, 0.0, 1.0, -1.0])], "ppo", {})
    (own,) = data.datums
    assert own.prompt_length == 2
    assert own.log_probs.tolist() == [0.0, -1.0, -2.0]
    assert own.advantages.tolist() == [0.0, 1.0, -1.0]
    assert [column.tolist() for column in data.by_position(np.array([-0.1, -0.2, -0.3]))] == [
        pytest.approx([0.0, -0.1, -0.2, -0.3])
    ]


def test_a_target_in_the_middle_that_does_not_count_is_left_out():
    sent = datum([3, 4, 5, 6], target_tokens=[4, 9, 6, 7], weights=[1.0, 0.0, 1.0, 1.0])
    data = parsed([sent], "cross_entropy", {})
    assert data.datums[0].mask.tolist() == [1, 0, 1, 1]
    assert data.by_position(np.array([-1.0, -2.0, -3.0, -4.0]))[0].tolist() == [-1.0, 0.0, -3.0, -4.0]


def test_chunks_are_joined_and_weights_may_be_absent():
    chunks = [EncodedTextChunk(tokens=[3, 4]), EncodedTextChunk(tokens=[5])]
    sent = Datum(model_input=ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": [4, 5, 6]})
    (own,) = parsed([sent], "cross_entropy", {}).datums
    assert own.tokens.tolist() == [3, 4, 5, 6]
    assert own.loss_weights.tolist() == [1.0, 1.0, 1.0]


def test_sparse_targets_of_one_column():
    sparse = TensorData.from_torch_sparse(torch.tensor([[4], [5], [6]]))
    weights = TensorData.from_torch_sparse(torch.tensor([[0.0], [1.0], [2.0]]))
    (own,) = parsed([datum([3, 4, 5], target_tokens=sparse, weights=weights)], "cross_entropy", {}).datums
    assert own.tokens.tolist() == [3, 4, 5, 6]
    assert own.loss_weights.tolist() == [0.0, 1.0, 2.0]


def test_thresholds_that_are_sent_with_every_token():
    limits = {"clip_low_threshold": [0.7, 0.7], "clip_high_threshold": [1.4, 1.4]}
    (part,) = parsed([policy([3, 4], [4, 5], [-1.0, -1.0], [1.0, 1.0], **limits)], "ppo", {}).parts
    assert part.loss["eps_clip"] == pytest.approx(0.3, abs=1e-12)
    assert part.loss["eps_clip_high"] == pytest.approx(0.4, abs=1e-12)


def test_defaults_are_the_documented_ones():
    sent = [policy([3, 4], [4, 5], [-1.0, -1.0], [1.0, 1.0])]
    found = {name: parsed(sent, name, {}).parts[0].loss for name in ("ppo", "cispo")}
    assert found["ppo"] == {"name": "clip", "eps_clip": pytest.approx(0.2), "eps_clip_high": pytest.approx(0.2)}
    assert found["cispo"] == {"name": "cispo", "eps_clip": 1.0, "eps_clip_high": 3.0}


IMAGE = Datum(
    model_input=ModelInput(chunks=[ImageChunk(data=b"x", format="png")]), loss_fn_inputs={"target_tokens": [4]}
)


@pytest.mark.parametrize(
    ("sent", "name", "message"),
    [
        ([], "ppo", "data: empty"),
        ([IMAGE], "cross_entropy", "data[0].model_input.chunks[0]: image"),
        ([datum([3, 4], weights=[1.0, 1.0])], "cross_entropy", '"target_tokens"]: missing'),
        ([datum([3, 4], target_tokens=[4])], "cross_entropy", "shape (1,), and model_input has 2 tokens"),
        (
            [datum([3, 4], target_tokens=[4, 5], mask=TensorData.from_numpy(np.ones(2, np.float32)))],
            "ppo",
            '"mask"]: unknown',
        ),
        ([datum([3, 99], target_tokens=[99, 5])], "cross_entropy", "data[0].model_input[1] = 99: outside"),
        ([datum([3, 4], target_tokens=[4, 70])], "cross_entropy", '"target_tokens"][1] = 70: outside'),
        (
            [policy([3, 4], [9, 5], [0.0, 0.0], [0.0, 1.0])],
            "dro",
            '"target_tokens"][0] is 9, and the next token of model_input is 4: a target that counts in dro must be the next',
        ),
        (
            [datum([3, 4], target_tokens=array([[4, 5], [5, 70]]))],
            "cross_entropy",
            '"target_tokens"][1, 1] = 70: outside',
        ),
        (
            [datum([3, 4], target_tokens=array([[4, 5], [5, 6]]), weights=[1.0, 1.0])],
            "cross_entropy",
            '"weights"]: shape (2,), and model_input has 2 tokens with target_tokens of shape (2, 2)',
        ),
        (
            [datum([3, 4], target_tokens=array([[4, 5]]))],
            "cross_entropy",
            '"target_tokens"]: shape (1, 2), and model_input has 2 tokens',
        ),
        (
            [
                datum(
                    [3, 4],
                    target_tokens=array([[4, 5], [5, 6]]),
                    weights=array(np.array([[1, 1], [np.inf, 1]], np.float32)),
                )
            ],
            "cross_entropy",
            '"weights"][1, 0] is not finite',
        ),
        ([datum([3, 4], target_tokens=array(np.ones((2, 129), int)))], "cross_entropy", "from 1 to 128 targets"),
        (
            [policy([3, 4], array([[4, 5], [5, 6]]), [0.0, 0.0], [0.0, 1.0])],
            "ppo",
            '"target_tokens"]: shape (2, 2): ppo has one target at a position',
        ),
        ([datum([3, 4], target_tokens=[4, 5])], "ppo", '"advantages"]: missing'),
        ([policy([3, 4], [4, 5], [0.0, float("nan")], [1.0, 1.0])], "ppo", '"logprobs"][1] is not finite'),
        (
            [policy([3, 4], [4, 5], [0.0, 0.0], [1.0, 1.0], sequence_ratio_mask=[0.0, 1.0])],
            "gspo",
            '"advantages"][0] is not 0',
        ),
        (
            [policy([3] * 17, [3] * 17, [0.0] * 17, [1.0] * 17, clip_low_threshold=[0.1 + n / 100 for n in range(17)])],
            "ppo",
            "17 different pairs",
        ),
        (
            [datum(list(range(1, 49)) * 2, target_tokens=[*range(2, 49), *range(1, 49), 1])],
            "cross_entropy",
            "takes 64",
        ),
    ],
)
def test_what_is_wrong_is_named(sent, name, message):
    with pytest.raises(RequestError) as error:
        parsed(sent, name, {})
    assert message in str(error.value)


def test_several_targets_at_a_position():
    """The second datum has one at each, which are the next tokens: it is of the same request."""
    wide = datum([3, 4], target_tokens=array([[4, 5], [6, 6]]), weights=array(np.array([[0.5, 0], [0, 2]], np.float32)))
    sparse = TensorData.from_torch_sparse(torch.tensor([[7, 0, 9], [0, 0, 8]]))
    data = parsed(
        [wide, datum([3, 4, 5], target_tokens=[4, 5, 6]), datum([5, 6], target_tokens=sparse)], "cross_entropy", {}
    )
    first, second, third = data.datums
    assert first.tokens.tolist() == [3, 4]
    assert first.prompt_length == 2
    assert first.targets.tolist() == [[4, 5], [6, 6]]
    assert first.loss_weights.tolist() == [0.5, 0.0, 0.0, 2.0]
    assert second.targets.tolist() == [[4], [5], [6]]
    assert second.loss_weights.tolist() == [1.0, 1.0, 1.0]
    assert third.targets.tolist() == [[7, 0, 9], [0, 0, 8]]
    assert data.num_tokens == 4 + 3 + 6
    found = [column.tolist() for column in data.by_position(-np.arange(13, dtype=np.float32))]
    assert found == [[[0, -1], [-2, -3]], [-4, -5, -6], [[-7, -8, -9], [-10, -11, -12]]]


def test_a_target_of_its_own_that_counts():
    (own,) = parsed([datum([3, 4], target_tokens=[9, 5])], "cross_entropy", {}).datums
    assert own.targets.tolist() == [[9], [5]]


def test_results_have_the_shape_of_the_targets():
    """As the SDK reads them: datums with different K are in records of their own."""
    sent = [
        datum([3, 4], target_tokens=array([[4, 5], [6, 6]]), weights=array(np.array([[0.5, 0], [0, 2]], np.float32))),
        datum([3], target_tokens=array([[4, 9]])),
        datum([3, 4, 5], target_tokens=[4, 5, 6]),
    ]
    data = parsed(sent, "cross_entropy", {})
    outcome = trained_outcome(Registry.from_environment(), data, -np.arange(9, dtype=np.float32))
    found = deserialize_forward_backward_output(outcome.content)
    log_probs = [output["logprobs"].to_numpy().tolist() for output in found.loss_fn_outputs]
    assert log_probs == [[[0, -1], [-2, -3]], [[-4, -5]], [-6, -7, -8]]
    assert found.metrics["loss:sum"] == pytest.approx(2 * 3 + 4 + 5 + 6 + 7 + 8)
    assert [output["elementwise_loss"].shape for output in found.loss_fn_outputs] == [[2, 2], [1, 2], [3]]
