"""Groups pass between processes with every field as it was."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from slime_core.errors import RolloutError
from slime_core.rollout.trace import GroupTrace, ResponseTrace, Turn
from slime_core.types.completion import Completion, FinishReason
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SpanReward, Status, VersionSpan
from slime_rollout_workers.columns import GroupColumns, RewardColumns
from slime_rollout_workers.flat import COMPLETION, pack_trace, unpack_trace

PROMPT = Prompt(group_index=7, text="1+1=", token_ids=np.array([1, 2, 3], np.int32), label="2", metadata={"a": 1})
OTHER = Prompt(group_index=7, text="2", token_ids=np.array([4], np.int32))


def sample(number: int, length: int, **changes: object) -> Sample:
    made = Sample(
        index=number,
        group_index=7,
        rollout_id=number,
        prompt=PROMPT,
        tokens=np.concatenate([PROMPT.token_ids, np.arange(length, dtype=np.int32) + 10 * number]),
        prompt_length=3,
        loss_mask=(np.arange(length) % 2).astype(np.uint8),
        rollout_log_probs=-np.arange(length, dtype=np.float32) / 3,
        response="x" * length,
        raw_response="x" * length + "$",
        spans=(VersionSpan(4, 0, length),),
        metadata={"b": [number]},
        counts={"turns": 2.0},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


SAMPLES = [
    sample(14, 4, status=Status.TRUNCATED),
    sample(15, 0, remove_sample=True, credit_key=3, status=Status.FAILED),
    sample(16, 2, routed_experts=np.arange(8, dtype=np.uint8).reshape(4, 2, 1)),
    replace(sample(16, 2), prompt=OTHER, tokens=np.array([4, 5, 6], np.int32), prompt_length=1),
]


def travelled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))  # noqa: S301 - made here


def equal(left: Sample, right: Sample) -> bool:
    for field in fields(Sample):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or not np.array_equal(a, b):
                return False
        elif field.name != "prompt" and a != b:
            return False
    return True


def test_samples_pass_through_columns():
    columns = travelled(GroupColumns.of(SAMPLES, PROMPT))
    returned = columns.samples(PROMPT)
    assert len(returned) == len(SAMPLES)
    assert all(equal(*pair) for pair in zip(SAMPLES, returned, strict=True))
    # The group's prompt does not travel, and is one object.
    assert all(one.prompt is PROMPT for one in returned[:3])
    assert returned[3].prompt.text == "2"
    assert b"1+1=" not in pickle.dumps(GroupColumns.of(SAMPLES, PROMPT))


def test_a_group_without_samples():
    assert GroupColumns.of([], PROMPT).samples(PROMPT) == []


def test_what_scoring_changed_passes_alone():
    scored = [
        replace(SAMPLES[0], reward=0.5, reward_parts={"score": 0.5}, span_rewards=(SpanReward(0, 2, 0.25),)),
        SAMPLES[1],
        replace(SAMPLES[2], status=Status.FAILED, remove_sample=True, metadata={"failure": "x"}),
        replace(SAMPLES[3], reward=1.0),
    ]
    rewards = travelled(RewardColumns.of(SAMPLES, scored))
    assert [sorted(change) for change in rewards.changes] == [
        ["reward", "reward_parts", "span_rewards"],
        [],
        ["metadata", "remove_sample", "status"],
        ["reward"],
    ]
    assert all(equal(*pair) for pair in zip(scored, rewards.applied(SAMPLES), strict=True))


def test_rewards_of_samples_that_have_not_arrived_are_an_error():
    rewards = RewardColumns.of(SAMPLES, SAMPLES)
    with pytest.raises(RolloutError, match="rewards of 4 samples arrived, and 0 samples"):
        rewards.applied([])


def test_a_completion_passes_as_a_tuple():
    completion = Completion(
        request_id="train/1/0",
        token_ids=np.array([5, 6], np.int32),
        log_probs=np.array([-1, -2], np.float32),
        finish_reason=FinishReason.STOP,
        spans=(VersionSpan(1, 0, 2),),
        cached_tokens=3,
        extra={"spec_accept_rate": 0.5},
        queue_s=0.25,
    )
    returned = COMPLETION.unpack(travelled(COMPLETION.pack(completion)))
    for field in fields(Completion):
        np.testing.assert_array_equal(getattr(returned, field.name), getattr(completion, field.name))
    with pytest.raises(ValueError, match="argument 2 is"):
        COMPLETION.unpack(COMPLETION.pack(completion)[:-1])


def test_a_trace_passes():
    turn = Turn(
        request_id="train/1/0", queue_s=0.1, generate_s=1.0, prompt_tokens=3, tokens=4, cached_tokens=0, engine=1,
        finish="stop", extra={},
    )  # fmt: skip
    response = ResponseTrace(index=1, attempt=0, began=10.0, seconds=2.0, turns=(turn, turn))
    trace = GroupTrace(scope="train", group_index=7, reward_s=0.5, responses=[response, response])
    assert unpack_trace(travelled(pack_trace(trace))) == trace
