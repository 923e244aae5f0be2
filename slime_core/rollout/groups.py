"""GroupRunner: generates and scores a group of samples for a prompt."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from slime_core.atomic_io.json_text import json_text
from slime_core.contracts.generator import Generator
from slime_core.errors import (
    DataError,
    EngineError,
    EngineUnavailable,
    PluginError,
    RewardError,
    RolloutError,
    SlimeError,
    StorageError,
)
from slime_core.registry.boundary import foreign, name_of, require
from slime_core.rollout.client import EngineClient
from slime_core.rollout.episode import EngineEpisode
from slime_core.rollout.failures import with_failure
from slime_core.rollout.scoring import Judge, ScoringPlan, score_group
from slime_core.rollout.staleness import mask_kept
from slime_core.rollout.trace import GroupTrace, ResponseTrace
from slime_core.types.completion import SamplingParams
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status
from slime_core.types.trajectory import without_untrained_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
LONGEST_INTERVAL_S: Final = 3.0
"""Between two aborts of the same requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Settings of the groups of one purpose (training, or one evaluation set)."""

    scope: str
    """Distinguishes request ids and seeds of different purposes."""
    num_samples: int
    sampling: SamplingParams
    seed: int
    max_context_len: int | None
    scoring: ScoringPlan | None
    """None: no reward."""
    evaluation: bool
    max_retries: int
    mask_offpolicy: bool = False
    """Kept tokens are masked if a newer policy continued the response."""
    routed_experts: bool = False
    """Samples need the engines' expert ids."""
    adapter: str | None = None
    """See `GenerateRequest.adapter`."""


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class RunningGroup:
    """A group in progress."""

    prompt: Prompt
    kept: Mapping[int, Sequence[Sample]] = field(default_factory=dict)
    """Samples of an earlier attempt, by their index."""
    task: asyncio.Task[SampleGroup] = field(init=False)
    episodes: list[EngineEpisode] = field(default_factory=list)
    """Episodes of all attempts, for aborts."""
    traces: list[ResponseTrace] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by an abort: further requests of the group get empty completions, and it is not scored."""
    generated: list[Sample] = field(default_factory=list)
    """All samples once the last one is generated, perhaps without rewards."""
    all_generated: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `generated` is complete."""

    @property
    def request_ids(self) -> list[str]:
        return [request_id for episode in self.episodes for request_id in episode.request_ids]


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A generator or a reward raised."""

    prompt: Prompt
    index: int
    attempt: int
    """1 for the first try."""
    will_retry: bool
    error: Exception


@dataclass(kw_only=True, eq=False, repr=False)
class GroupRunner:
    """Starts groups of one purpose; each group runs in its own task."""

    settings: GroupSettings = field(kw_only=False)
    generator: Generator
    client: EngineClient
    tokenizer: PreTrainedTokenizerBase
    rewards: Judge | None
    on_failure: Callable[[SampleFailure], None]
    on_trace: Callable[[GroupTrace], None] = lambda trace: None
    versions: Callable[[], range] = lambda: range(1)
    """Policy versions whose tokens may be trained on now."""

    def start(self, prompt: Prompt, kept: Sequence[Sample] = ()) -> RunningGroup:
        """Starts all responses concurrently. kept: samples of an earlier attempt; unfinished ones are continued."""
        by_index: defaultdict[int, list[Sample]] = defaultdict(list)
        for sample in kept:
            by_index[sample.index].append(sample)
        group = RunningGroup(prompt=prompt, kept=by_index)
        group.task = asyncio.create_task(self.run(group))
        return group

    async def abort(self, groups: Sequence[RunningGroup]) -> None:
        """Aborts the groups' requests. Repeat it until their tasks end: an engine may not have received a request yet."""
        for group in groups:
            group.stop.set()
        await self.client.abort([request_id for group in groups for request_id in group.request_ids])

    async def run(self, running: RunningGroup) -> SampleGroup:
        """What `RunningGroup.task` runs."""
        first = running.prompt.group_index * self.settings.num_samples
        tasks = [
            asyncio.create_task(self._respond(running, first + position, position))
            for position in range(self.settings.num_samples)
        ]
        running.generated += [sample for response in await all_or_none(tasks) for sample in response]
        running.all_generated.set()
        group = SampleGroup(prompt=running.prompt, samples=tuple(running.generated))
        if running.stop.is_set():
            # An aborted group is scored when it is continued and complete, since a reward may compare all its samples.
            return group
        began = time.perf_counter()
        group = await self.score(group)
        self.on_trace(
            GroupTrace(
                scope=self.settings.scope,
                group_index=group.group_index,
                reward_s=time.perf_counter() - began,
                responses=running.traces,
            )
        )
        return group

    async def _respond(self, running: RunningGroup, index: int, position: int) -> Sequence[Sample]:
        prompt, kept = running.prompt, running.kept.get(index, ())
        if kept and all(sample.status in (Status.COMPLETED, Status.TRUNCATED) for sample in kept):
            return kept
        failure: Exception | None = None
        for attempt in range(self.settings.max_retries + 1):
            episode = EngineEpisode(
                prompt=prompt,
                index=index,
                position=position,
                scope=self.settings.scope,
                attempt=attempt,
                seed=self.settings.seed,
                stop=running.stop,
                sampling=self.settings.sampling,
                max_context_len=self.settings.max_context_len,
                client=self.client,
                tokenizer=self.tokenizer,
                evaluation=self.settings.evaluation,
                # A response with several samples cannot be continued: it starts anew.
                kept=kept[0] if len(kept) == 1 else None,
                scorer=None if self.rewards is None else self.score,
                routed_experts=self.settings.routed_experts,
                adapter=self.settings.adapter,
                trained_versions=self.versions,
            )
            running.episodes.append(episode)
            began = time.perf_counter()
            try:
                generated = await self._generate(episode)
                samples = [without_untrained_end(sample, self.tokenizer) for sample in generated]
                if self.settings.mask_offpolicy and len(kept) == len(samples) == 1:
                    samples = [mask_kept(samples[0], kept[0].response_length)]
                return samples
            except EngineUnavailable as error:
                # The request was lost too often: perhaps it is the cause that engines fail.
                self.on_failure(SampleFailure(prompt, index, attempt + 1, False, error))
                failure = error
                break
            except (EngineError, PluginError, RewardError, StorageError):
                raise
            except SlimeError as error:
                will_retry = attempt < self.settings.max_retries
                self.on_failure(SampleFailure(prompt, index, attempt + 1, will_retry, error))
                failure = error
                await self._end_requests(episode)
            finally:
                running.traces.append(episode.trace(time.perf_counter() - began))
        assert failure is not None
        return [with_failure(failed_sample(prompt, index), failure)]

    async def _generate(self, episode: EngineEpisode) -> Sequence[Sample]:
        prompt = episode.prompt
        call = f"generate on {prompt.origin or f'group {prompt.group_index}'}"
        with foreign(self.generator, call, error=RolloutError):
            samples = check_samples(await self.generator.generate(episode), self.generator)
        await self._end_requests(episode)
        return samples

    async def _end_requests(self, episode: EngineEpisode) -> None:
        """Aborts requests that the generator has not waited for: they would run on while engines sleep or get weights. Repeats
        it, since an engine may not have received a request yet."""
        interval = 0.01
        while episode.unfinished:
            await self.client.abort(sorted(episode.unfinished))
            await asyncio.sleep(interval)
            interval = min(2 * interval, LONGEST_INTERVAL_S)

    async def score(self, group: SampleGroup) -> SampleGroup:
        """With the run's rewards, where a sample has none yet; unchanged if the run has no reward."""
        plan = self.settings.scoring
        if plan is None or self.rewards is None:
            return group
        scored, failures = await score_group(self.rewards, plan, group)
        for n, error in failures.items():
            self.on_failure(SampleFailure(group.prompt, group.samples[n].index, 1, False, error))
        return scored


async def all_or_none(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Returns all results in order. After the first failure it cancels the others, waits for their end, and raises it."""
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            # Tasks that are being cancelled with this one must not be cancelled again: that would stop their cleanup.
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def check_samples(samples: Sequence[Sample], generator: Generator) -> Sequence[Sample]:
    """Raises PluginError if there is no sample, its vectors do not fit its response, or its metadata cannot be saved: the batch
    would not detect the vectors, and metadata are saved only at a checkpoint."""
    where = name_of(generator)
    fits = isinstance(samples, Sequence) and all(isinstance(sample, Sample) for sample in samples)
    require(fits, generator, "generate", samples, "a list of Samples")
    if not samples:
        raise PluginError(f"{where} returned no sample; return one also for an empty response.")
    for sample in samples:
        length = sample.response_length
        lengths = {"loss_mask": len(sample.loss_mask), "rollout_log_probs": len(sample.rollout_log_probs)}
        if wrong := {name: found for name, found in lengths.items() if found != length}:
            raise PluginError(f"{where}: sample {sample.index} has {length} response tokens, but {wrong}.")
        if sample.prompt_length < 1 or any(not 0 <= start <= end <= length for _, start, end in sample.spans):
            raise PluginError(
                f"{where}: sample {sample.index} has prompt_length {sample.prompt_length} and spans "
                f"{[tuple(span) for span in sample.spans]} with {length} response tokens."
            )
        if sample.metadata and sample.metadata is not sample.prompt.metadata:
            try:
                json_text(sample.metadata, f"{where}: sample {sample.index}: metadata")
            except DataError as error:
                raise PluginError(str(error)) from error
    return samples


def failed_sample(prompt: Prompt, index: int) -> Sample:
    """Sample that replaces a response that could not be generated."""
    return Sample(
        index=index,
        group_index=prompt.group_index,
        rollout_id=index,
        prompt=prompt,
        tokens=prompt.token_ids,
        prompt_length=len(prompt.token_ids),
        loss_mask=np.empty(0, np.uint8),
        rollout_log_probs=np.empty(0, np.float32),
        status=Status.FAILED,
        remove_sample=True,
    )


def is_failed(group: SampleGroup) -> bool:
    return any(sample.status is Status.FAILED for sample in group.samples)


def is_aborted(group: SampleGroup) -> bool:
    return any(sample.status is Status.ABORTED for sample in group.samples)
