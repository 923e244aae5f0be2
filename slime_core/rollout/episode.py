"""EngineEpisode: the kernel's implementation of `Episode`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_core.errors import RewardError
from slime_core.rollout.client import EngineClient
from slime_core.rollout.partial_stop import strip_partial_stop
from slime_core.rollout.routed import RoutedSequences
from slime_core.rollout.seeds import request_seed
from slime_core.rollout.trace import ResponseTrace, Turn
from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams
from slime_core.types.image import Image
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup
from slime_core.types.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Scorer: TypeAlias = Callable[[SampleGroup], Awaitable[SampleGroup]]


@dataclass(kw_only=True, eq=False, repr=False)
class EngineEpisode:
    """Numbers the turns of a response. Once `stop` is set, or without room for another token, completions are empty."""

    prompt: Prompt
    index: int
    position: int
    scope: str
    attempt: int
    seed: int
    stop: asyncio.Event
    sampling: SamplingParams
    max_context_len: int | None
    client: EngineClient
    tokenizer: PreTrainedTokenizerBase
    evaluation: bool
    kept: Sample | None = None
    scorer: Scorer | None = None
    routed_experts: bool = False
    """Requests expert ids."""
    adapter: str | None = None
    trained_versions: Callable[[], range] = lambda: range(1)
    request_ids: list[str] = field(default_factory=list, init=False)
    unfinished: set[str] = field(default_factory=set, init=False)
    """Ids of requests that have no response yet."""
    turns: list[Turn] = field(default_factory=list, init=False)
    began: float = field(default_factory=time.time, init=False)

    def __post_init__(self) -> None:
        # A retry needs its own request ids, but the same seeds, so that it repeats what was lost.
        scope = f"{self.scope}.{self.attempt}" if self.attempt else self.scope
        self._id = f"{scope}/{self.index}"
        self._routed = RoutedSequences(self.kept) if self.routed_experts else None

    @property
    def versions(self) -> range:
        return self.trained_versions()

    def trajectory(self, prompt: Prompt | None = None) -> Trajectory:
        started = Trajectory(prompt or self.prompt, index=self.index, rollout_id=self.index, tokenizer=self.tokenizer)
        if prompt is None and self.kept is not None:
            started.restart_from(self.kept)
        return started

    async def stopped(self) -> None:
        await self.stop.wait()

    async def score(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        if self.scorer is None:
            raise RewardError("the generator needs rewards, and the run has none. Pass one with --reward.")
        return (await self.scorer(SampleGroup(prompt=self.prompt, samples=tuple(samples)))).samples

    async def complete(self, token_ids: npt.NDArray[np.int32], sampling: SamplingParams | None = None) -> Completion:
        sampling = sampling or self.sampling
        if self.max_context_len is not None:
            room = max(0, self.max_context_len - len(token_ids))
            if room < sampling.max_new_tokens:
                sampling = replace(sampling, max_new_tokens=room)
        turn = len(self.request_ids)
        request = GenerateRequest(
            request_id=f"{self._id}/{turn}",
            token_ids=np.asarray(token_ids, np.int32),
            sampling=sampling,
            seed=request_seed(self.seed, self.scope, self.prompt.group_index, self.position, turn),
            session_id=self._id,
            images=images_of(self.prompt, token_ids),
            adapter=self.adapter,
            routed_experts_from=None if self._routed is None else self._routed.known(token_ids),
        )
        self.request_ids.append(request.request_id)
        if self.stop.is_set():
            return Completion.empty(request, FinishReason.ABORT)
        if sampling.max_new_tokens <= 0:
            return Completion.empty(request, FinishReason.LENGTH)
        began = time.perf_counter()
        self.unfinished.add(request.request_id)
        try:
            completion = await self.client.generate(request)
        finally:
            self.unfinished.discard(request.request_id)
        self.turns.append(
            Turn(
                request_id=request.request_id,
                queue_s=completion.queue_s,
                generate_s=time.perf_counter() - began - completion.queue_s,
                prompt_tokens=len(request.token_ids),
                tokens=len(completion.token_ids),
                cached_tokens=completion.cached_tokens,
                engine=completion.engine_index,
                finish=completion.finish_reason.value,
                extra=completion.extra,
            )
        )
        if self._routed is not None:
            completion = self._routed.joined(request, completion)
        if completion.finish_reason is FinishReason.ABORT:
            completion = strip_partial_stop(completion, sampling.stop, self.tokenizer)
        return completion

    def trace(self, seconds: float) -> ResponseTrace:
        """What took how long in this response, which took `seconds` in all."""
        return ResponseTrace(
            index=self.index, attempt=self.attempt, began=self.began, seconds=seconds, turns=tuple(self.turns)
        )


def images_of(prompt: Prompt, token_ids: npt.NDArray[np.int32]) -> tuple[Image, ...]:
    """The prompt's images, for tokens that begin with the prompt; a generator that writes prompts of its own has none."""
    length = len(prompt.token_ids)
    return prompt.images if prompt.images and np.array_equal(token_ids[:length], prompt.token_ids) else ()
