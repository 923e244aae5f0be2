"""Groups of samples to try filters and rewards on."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slime_core.contracts.example import RewardExample
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status, VersionSpan


def group_of(
    responses: Sequence[str],
    *,
    rewards: Sequence[float | None] | None = None,
    statuses: Sequence[Status] | None = None,
    example: RewardExample | None = None,
    group_index: int = 3,
) -> SampleGroup:
    """One prompt and these responses, a token for each character."""
    asked = example or RewardExample(prompt="2+2=", label="4", responses=responses)
    prompt = Prompt(
        group_index=group_index,
        text=asked.prompt,
        token_ids=np.arange(1, 4, dtype=np.int32),
        label=asked.label,
        metadata=asked.metadata,
        origin="train.jsonl:7",
    )
    samples = []
    for position, response in enumerate(responses):
        length = len(response)
        index = group_index * len(responses) + position
        status = Status.COMPLETED if statuses is None else statuses[position]
        samples.append(
            Sample(
                index=index,
                group_index=group_index,
                rollout_id=index,
                prompt=prompt,
                tokens=np.concatenate([prompt.token_ids, 5 + np.arange(length, dtype=np.int32)]),
                prompt_length=len(prompt.token_ids),
                loss_mask=np.ones(length, np.uint8),
                rollout_log_probs=np.full(length, -0.5, np.float32),
                response=response,
                spans=(VersionSpan(2, 0, length),) if length else (),
                status=status,
                reward=None if rewards is None else rewards[position],
                remove_sample=status is Status.FAILED,
                metadata=dict(asked.metadata),
            )
        )
    return SampleGroup(prompt=prompt, samples=tuple(samples))


def frozen(thing: object) -> bytes:
    """All of it as bytes, to see later whether something was changed."""
    return pickle.dumps(thing)


def odd_groups(metadata: Sequence[Mapping[str, Any]] = ({},)) -> dict[str, SampleGroup]:
    """What a run may hand to a filter, by what is odd about it; the prompts have these metadata in turn."""
    responses = ("4", "it is 4", "", "5 because of this and that")
    done, cut, failed = Status.COMPLETED, Status.TRUNCATED, Status.FAILED
    groups = {
        "different rewards": group_of(responses, rewards=(1.0, 1.0, 0.0, 0.0)),
        "equal rewards": group_of(responses, rewards=(1.0,) * 4),
        "rewards of zero": group_of(responses, rewards=(0.0,) * 4),
        "negative rewards": group_of(responses, rewards=(-1.0, -1.0, -1.0, -1.0)),
        "no rewards": group_of(responses),
        "failed samples": group_of(responses, rewards=(1.0, 0.0, None, None), statuses=(done, cut, failed, failed)),
        "only failed samples": group_of(responses, rewards=(None,) * 4, statuses=(failed,) * 4),
        "cut responses": group_of(responses, rewards=(0.5, 0.25, 0.0, 1.0), statuses=(cut,) * 4),
        "one sample": group_of(("4",), rewards=(1.0,)),
        "empty responses": group_of(("", ""), rewards=(0.0, 1.0)),
    }
    return {
        label: with_metadata(group, metadata[number % len(metadata)])
        for number, (label, group) in enumerate(groups.items())
    }


def with_metadata(group: SampleGroup, metadata: Mapping[str, Any]) -> SampleGroup:
    prompt = replace(group.prompt, metadata=metadata)
    samples = tuple(replace(sample, prompt=prompt, metadata=dict(metadata)) for sample in group.samples)
    return SampleGroup(prompt=prompt, samples=samples)
