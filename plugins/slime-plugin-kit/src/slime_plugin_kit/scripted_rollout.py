"""Prompts, episodes and a tokenizer for generators, collectors and sources."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from slime_core.contracts.source import DataSource
from slime_core.rollout.client import EngineClient
from slime_core.rollout.episode import EngineEpisode
from slime_core.types.completion import SamplingParams
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup
from slime_plugin_kit.scripted_engine import EngineInLoop, ScriptedEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ALPHABET: Final = "0123456789+-=*/ abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>{}[]\\\"':.,_\n?!"
BUDGET: Final = 16
"""Tokens of a response."""
SEED: Final = 5
CHAT_TEMPLATE: Final = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    from slime_models.new_model import character_tokenizer

    made = character_tokenizer(ALPHABET)
    made.chat_template = CHAT_TEMPLATE
    return made


def prompt_of(number: int) -> Prompt:
    text = f"{number}+{number}="
    return Prompt(
        group_index=number,
        text=text,
        token_ids=np.array(tokenizer().encode(text, add_special_tokens=False), np.int32),
        label=str(2 * number),
        messages=[{"role": "user", "content": text}],
        origin=f"train.jsonl:{number + 1}",
    )


def client_of(*engines: ScriptedEngine) -> EngineClient:
    return EngineClient([EngineInLoop(engine) for engine in engines], concurrency=64)


def vocab_size() -> int:
    return len(tokenizer())


def episode_of(
    client: EngineClient,
    number: int = 3,
    *,
    attempt: int = 0,
    kept: Sample | None = None,
    stop: asyncio.Event | None = None,
    budget: int = BUDGET,
    max_context_len: int | None = None,
) -> EngineEpisode:
    """The kernel's own, for the first response to a prompt."""
    return EngineEpisode(
        prompt=prompt_of(number),
        index=4 * number,
        position=0,
        scope="train",
        attempt=attempt,
        seed=SEED,
        stop=stop or asyncio.Event(),
        sampling=SamplingParams(max_new_tokens=budget),
        max_context_len=max_context_len,
        client=client,
        tokenizer=tokenizer(),
        evaluation=False,
        kept=kept,
        scorer=score_by_length,
    )


async def score_by_length(group: SampleGroup) -> SampleGroup:
    """A reward that every response has."""
    scored = (replace(sample, reward=sample.response_length / 8) for sample in group.samples)
    return replace(group, samples=tuple(scored))


class NumberedPrompts(DataSource):
    """Prompt after prompt, for ever or up to `end`."""

    def __init__(self, end: int | None = None) -> None:
        self.num_drawn = 0
        self._end = end

    def take(self, num_prompts: int) -> list[Prompt]:
        first = self.num_drawn
        last = first + num_prompts if self._end is None else min(first + num_prompts, self._end)
        self.num_drawn = last
        return [prompt_of(number) for number in range(first, last)]

    def state(self) -> Mapping[str, Any]:
        return {"num_drawn": self.num_drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.num_drawn = state["num_drawn"]

    @property
    def num_rows(self) -> int | None:
        return self._end

    def fingerprint(self) -> str:
        return f"numbered prompts up to {self._end}"


def trained_pairs(samples: Sequence[Sample]) -> list[tuple[int, float]]:
    """Token and log-prob wherever the mask is on."""
    return [
        (int(token), float(log_prob))
        for sample in samples
        for token, log_prob, bit in zip(sample.response_tokens, sample.rollout_log_probs, sample.loss_mask, strict=True)
        if bit
    ]
