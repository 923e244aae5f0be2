"""Groups of samples to try filters and rewards on."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from slime_core.contracts.example import RewardExample
from slime_core.types.completion import Completion, FinishReason
from slime_core.types.prompt import Prompt
from slime_core.types.sample import SampleGroup, Status, VersionSpan
from slime_core.types.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


END: Final = "<|end|>"


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def group_of(
    responses: Sequence[str],
    *,
    rewards: Sequence[float | None] | None = None,
    statuses: Sequence[Status] | None = None,
    example: RewardExample | None = None,
    group_index: int = 3,
) -> SampleGroup:
    """One prompt and these responses, as a run makes them: a token for each byte, and the end token after a completed response
    that is not empty."""
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
        index = group_index * len(responses) + position
        status = Status.COMPLETED if statuses is None else statuses[position]
        grown = Trajectory(prompt, index=index, rollout_id=index, tokenizer=byte_tokenizer())
        grown.append_completion(completion_of(response, has_ended=status is Status.COMPLETED))
        sample = grown.finish(status=status, reward=None if rewards is None else rewards[position])
        samples.append(replace(sample, remove_sample=status is Status.FAILED))
    return SampleGroup(prompt=prompt, samples=tuple(samples))


def completion_of(response: str, *, has_ended: bool) -> Completion:
    text = response + END if response and has_ended else response
    tokens = np.array(byte_tokenizer().encode(text, add_special_tokens=False), np.int32)
    return Completion(
        request_id="example",
        token_ids=tokens,
        log_probs=np.full(len(tokens), -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        spans=(VersionSpan(2, 0, len(tokens)),),
    )


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
