"""MicroBatchMemory: micro-batches that do not fit are split where a rank is alone, and named where it is not."""

import numpy as np
import pytest

from slime_core.contracts.backend import OutOfDeviceMemory
from slime_core.errors import TrainingError
from slime_core.workers.micro_batch_memory import SCORING, TRAINING, MicroBatchMemory

LENGTHS = np.array([10, 40, 30, 20, 90, 5])


def of_at_most(tokens, asked):
    """A backend's call: the micro-batches, if each has at most so many tokens."""

    def call(micros):
        asked.append([micro.tolist() for micro in micros])
        for number, micro in enumerate(micros):
            if LENGTHS[micro].sum() > tokens:
                raise OutOfDeviceMemory(number, "tried to allocate 2 GiB")
        return [int(LENGTHS[micro].sum()) for micro in micros]

    return call


def fit(memory, tokens, micros, work=TRAINING):
    asked = []
    micros = [np.array(micro) for micro in micros]
    result, used = memory.fit(of_at_most(tokens, asked), lambda parts: parts, micros, LENGTHS, work)
    return result, [micro.tolist() for micro in used], asked


def test_a_micro_batch_is_split_until_it_fits():
    memory = MicroBatchMemory(alone=True)
    result, used, asked = fit(memory, 50, [[5], [0, 1, 2, 3]])
    # 100 tokens in two halves of 50: 40 + 10 and 30 + 20.
    assert used == [[5], [0, 1], [2, 3]]
    assert result == [5, 50, 50]
    assert len(asked) == 2
    assert (memory.take_splits(), memory.take_splits()) == (1, 0)

    _, used, asked = fit(memory, 45, [[0, 1, 2, 3]])
    assert sorted(np.concatenate(used).tolist()) == [0, 1, 2, 3]
    assert all(LENGTHS[micro].sum() <= 45 for micro in used)
    assert memory.take_splits() == len(asked) - 1 == len(used) - 1


def test_one_sample_cannot_be_split():
    with pytest.raises(TrainingError) as caught:
        fit(MicroBatchMemory(alone=True), 50, [[0], [5, 4]])
    assert str(caught.value).startswith(
        "out of memory in micro-batch 2 of 3 of an optimizer step: 90 tokens in 1 sample(s). One sample cannot be split: "
        "lower --rollout-max-response-len"
    )
    assert str(caught.value).endswith("The allocator: tried to allocate 2 GiB")


@pytest.mark.parametrize(
    ("work", "flag"), [(TRAINING, "--max-tokens-per-gpu"), (SCORING, "--log-probs-max-tokens-per-gpu")]
)
def test_several_ranks_end_with_what_is_too_large(work, flag):
    with pytest.raises(TrainingError) as caught:
        fit(MicroBatchMemory(alone=False), 50, [[0], [1, 2, 3]], work)
    assert f"micro-batch 2 of 2 of {work.name}: 90 tokens in 3 sample(s). Pass {flag} 45" in str(caught.value)
