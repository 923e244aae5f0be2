"""RolloutCall: one call of an old rollout function, in a thread of its own; its coroutines run in the run's event loop.

Groups that it generates by `generate_and_rm_group` are generated and scored as all groups of the run. Samples that it makes
itself, from `post` to the router or from elsewhere, are converted.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any, Final, TypeVar

import numpy as np

from slime_compat.new_sample import SampleConversion
from slime_compat.old_sample import Sample as Old
from slime_compat.old_sample import old_prompt, old_sample
from slime_compat.requests import Asking, sampling_params_of
from slime_compat.rollout_output import RolloutFnTrainOutput
from slime_compat.written_tokens import WrittenTokens
from slime_core.errors import RolloutError
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.episode import EngineEpisode
from slime_core.rollout.groups import GroupRunner, RunningGroup
from slime_core.types.buffer_item import BufferItem
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup

T = TypeVar("T")
SCOPE: Final = "rollout-function"
REJECTED: Final = "rollout_function"
ABORT_INTERVAL_S: Final = 3.0
"""An abort is repeated until every task has ended, since it misses requests that an engine has not received yet."""


class RolloutCall:
    """Also what the function gets as its data source."""

    def __init__(
        self, step: int, context: RolloutContext, conversion: SampleConversion, *, with_messages: bool
    ) -> None:
        """with_messages: prompts of samples are chats, as upstream without its apply_chat_template."""
        assert context.runner is not None
        self._step = step
        self._context = context
        self._runner: GroupRunner = context.runner
        self._conversion = conversion
        self._with_messages = with_messages
        self.asked = conversion.asked
        self._thread = threading.get_ident()
        self.loop = asyncio.get_running_loop()
        self._items: dict[int, BufferItem] = {}
        self._given: dict[int, Old] = {}
        """Samples as they were given to the function, by their index."""
        self._generated: dict[int, Sample] = {}
        """The kernel's sample by the id of its copy, which `_kept` keeps alive."""
        self._kept: list[Old] = []
        self._running: list[RunningGroup] = []
        self._used: set[int] = set()
        """Groups of the result."""
        self._closed = False
        self.rejected: list[tuple[SampleGroup, str]] = []
        """After `close`."""
        self.written = WrittenTokens(None)

    # --- the data source ----------------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[list[Old]]:
        """The samples of `num_samples` prompts, by group."""
        return self._in_loop(lambda: self._take(num_samples))

    __call__ = get_samples
    """Upstream passes the method itself to rollout functions of its own."""

    def add_samples(self, samples: Sequence[Sequence[Old]]) -> None:
        """Puts groups back, with the tokens that they have."""
        self._in_loop(lambda: self._put_back(samples))

    def __len__(self) -> int:
        rows = self._context.buffer.source.num_rows
        if rows is None:
            raise RolloutError(f"{self.asked}: len(data_source): the number of prompts is not known.")
        return rows

    def _in_loop(self, call: Callable[[], T]) -> T:
        async def called() -> T:
            return call()

        if self._closed:
            raise RolloutError(f"{self.asked}: it used its data source after its step had ended.")
        if threading.get_ident() == self._thread:
            return call()
        return asyncio.run_coroutine_threadsafe(called(), self.loop).result()

    def _take(self, num_groups: int) -> list[list[Old]]:
        groups = []
        for item in self._context.take(num_groups):
            self._items[item.prompt.group_index] = item
            groups.append(self._old_group(item))
        return groups

    def _old_group(self, item: BufferItem) -> list[Old]:
        size = self._runner.settings.num_samples
        begun = {sample.index: sample for sample in item.samples}
        group = []
        for index in range(item.prompt.group_index * size, (item.prompt.group_index + 1) * size):
            old = self._copy(begun[index]) if index in begun else old_prompt(item.prompt, index)
            if self._with_messages and item.prompt.messages is not None:
                old.prompt = copy.deepcopy(list(item.prompt.messages))
            self._given[index] = Old(prompt=copy.deepcopy(old.prompt), tokens=list(old.tokens))
            group.append(old)
        return group

    def _copy(self, sample: Sample) -> Old:
        old = old_sample(sample)
        self._kept.append(old)
        self._generated[id(old)] = sample
        return old

    def _put_back(self, groups: Sequence[Sequence[Old]]) -> None:
        for group in groups:
            item = self._item_of(group[0])
            if item is None:
                raise RolloutError(
                    f"{self.asked}: add_samples with a group of group_index {group[0].group_index}, which "
                    "get_samples of this step did not return: a run takes prompts from its data source alone."
                )
            begun = [self._sample(old, item.prompt) for old in group if len(old.tokens)]
            self._context.buffer.add_samples([item.as_partial(self._step, begun)])
            del self._items[item.prompt.group_index]

    # --- generation ---------------------------------------------------------------------------------------------------

    def asking(self) -> Asking:
        """For requests by `post`, numbered over the step."""
        settings = self._runner.settings
        episode = EngineEpisode(
            prompt=Prompt(group_index=self._step, text="", token_ids=np.zeros(1, np.int32)),
            index=self._step,
            position=0,
            scope=SCOPE,
            attempt=0,
            seed=settings.seed,
            stop=asyncio.Event(),
            sampling=settings.sampling,
            max_context_len=settings.max_context_len,
            client=self._runner.client,
            tokenizer=self._runner.tokenizer,
            evaluation=False,
            routed_experts=settings.routed_experts,
            trained_versions=self._runner.versions,
        )
        return Asking(episode, self.written)

    async def generate(self, group: Sequence[Old], sampling_params: dict[str, Any]) -> list[Any]:
        """Generates and scores a group of `get_samples`. RolloutError if the function changed it before."""
        item = self._item_of(group[0])
        if item is None:
            raise RolloutError(
                f"{self.asked}: generate_and_rm_group of a group of group_index {group[0].group_index}, which "
                "get_samples of this step did not return."
            )
        of_run = sampling_params_of(self._runner.settings.sampling)
        changed = [name for name, value in sampling_params.items() if name in of_run and value != of_run[name]]
        if changed or any(self._is_changed(old) for old in group):
            what = f"sampling_params {', '.join(changed)}" if changed else "prompts or tokens of the group"
            raise RolloutError(
                f"{self.asked}: it changed {what} before generate_and_rm_group, which generates as the run does. "
                "Set the keys of the rollout table, or send requests by post."
            )
        running = self._runner.start(item.prompt, item.samples)
        self._running.append(running)
        finished = await running.task
        by_index: dict[int, list[Old]] = {}
        for sample in finished.samples:
            by_index.setdefault(sample.index, []).append(self._copy(sample))
        has_parts = any(len(parts) > 1 for parts in by_index.values())
        return list(by_index.values()) if has_parts else [old for (old,) in by_index.values()]

    def _is_changed(self, old: Old) -> bool:
        given = self._given.get(-1 if old.index is None else old.index)
        return given is None or old.prompt != given.prompt or list(old.tokens) != given.tokens

    # --- the result ---------------------------------------------------------------------------------------------------

    def groups(self, output: RolloutFnTrainOutput) -> list[SampleGroup]:
        """The groups of the step, in the order in which the function returned them."""
        size = self._context.config.rollout_batch_size
        if len(output.samples) != size:
            raise RolloutError(
                f"{self.asked}: it returned {len(output.samples)} groups, and a step has {size} (--rollout-batch-size)."
            )
        return [self._group(group, place) for place, group in enumerate(output.samples)]

    def _group(self, group: Any, place: int) -> SampleGroup:
        olds = list(flat([group] if isinstance(group, Old) else group))
        item = self._item_of(olds[0])
        if item is not None:
            prompt = item.prompt
            self._used.add(prompt.group_index)
        else:
            number = self._step * self._context.config.rollout_batch_size + place
            start = len(olds[0].tokens) - olds[0].response_length
            prompt = Prompt(
                group_index=number,
                text=str(olds[0].prompt),
                token_ids=np.asarray(olds[0].tokens[:start], np.int32),
                label=olds[0].label,
                metadata=olds[0].metadata,
            )
        indices = count(prompt.group_index * max(self._runner.settings.num_samples, len(olds)))
        return SampleGroup(
            prompt=prompt,
            samples=tuple(self._sample(old, prompt, next(indices) if item is None else None) for old in olds),
        )

    def _item_of(self, old: Old) -> BufferItem | None:
        return None if old.group_index is None else self._items.get(old.group_index)

    def _sample(self, old: Old, prompt: Prompt, index: int | None = None) -> Sample:
        """index: of a sample that the function made itself; None: its own."""
        known = self._generated.get(id(old))
        if known is None:
            alike = (s for s in self._generated.values() if s.index == old.index and s.tokens.tolist() == old.tokens)
            known = next(alike, None)
        if known is not None and known.tokens.tolist() == list(old.tokens):
            return self._conversion.applied(known, old)
        number = index if index is not None else old.index
        assert number is not None
        return self._conversion.convert(
            old,
            prompt=prompt,
            index=number,
            rollout_id=number if old.rollout_id is None or index is not None else old.rollout_id,
            written=self.written,
            version=self._runner.versions()[-1],
        )

    async def close(self) -> None:
        """Aborts what the function left running. Prompts that it took and did not use go back; groups that it finished and did
        not return are `rejected`."""
        self._closed = True
        while running := [group for group in self._running if not group.task.done()]:
            await self._runner.abort(running)
            await asyncio.wait([group.task for group in running], timeout=ABORT_INTERVAL_S)
        finished = {group.prompt.group_index: group for group in self._running if not group.stop.is_set()}
        for number, item in self._items.items():
            if number in self._used:
                continue
            group = finished.get(number)
            if group is not None and not group.task.cancelled() and group.task.exception() is None:
                self.rejected.append((group.task.result(), REJECTED))
            else:
                self._context.buffer.add_samples([item.as_returned(self._step)])


def flat(values: Iterable[Any]) -> Iterable[Old]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value


calling: ContextVar[RolloutCall] = ContextVar("slime_compat_calling")
"""The step of the current rollout function. Its thread and tasks that it starts inherit it."""


def current_call(what: str) -> RolloutCall:
    found = calling.get(None)
    if found is None:
        raise RolloutError(f"{what} was called outside a rollout function (rollout.collector.rollout_function_path).")
    return found


async def generate_and_rm_group(
    args: Any, group: list[Old], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generates and scores a group by the generator and the reward of the run."""
    if evaluation:
        raise RolloutError(
            "generate_and_rm_group was called for an evaluation: set eval.datasets.NAME.generate instead."
        )
    return await current_call("generate_and_rm_group").generate(group, sampling_params)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in the event loop of the run, and waits for it in the thread of a rollout function."""
    call = calling.get(None)
    if call is None:
        return asyncio.run(coroutine)
    return asyncio.run_coroutine_threadsafe(coroutine, call.loop).result()
