"""pool: one pool with the groups of all steps. The groups that finish first are trained first, or those that the buffer filter
chooses. Groups that a step does not use stay in the pool.

With weight updates in flight, several steps are collected at once. A step takes its groups when it is the next to be trained,
and the sizes of all steps together limit the accepted and running groups, which is the admission rule of docs/adr/0011.
Otherwise a step ends by aborting the groups that it did not use.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from slime_core.contracts.collector import Collector, CollectorEvent
from slime_core.registry.boundary import held
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.groups import RunningGroup, is_aborted, is_failed
from slime_core.types.buffer_item import BufferItem
from slime_core.types.sample import SampleGroup
from slime_sources.group_filtering import apply_filters, check_limit, data_ended, marked, should_requeue
from slime_sources.pool_events import PoolEvent, PoolEventKind, PoolRecord
from slime_sources.staleness import is_stale, mask_stale

ABORT_INTERVAL_S: Final = 3.0
"""An abort is repeated until every task has ended: it may miss a request that has not reached an engine yet."""


@dataclass(frozen=True, slots=True, eq=False)
class PooledGroup:
    """A running or finished group, and its buffer item."""

    item: BufferItem
    running: RunningGroup


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """An accepted group that is not trained yet."""

    item: BufferItem
    group: SampleGroup


@dataclass(slots=True, eq=False)
class StepRequest:
    """A step that is being collected."""

    step: int
    context: RolloutContext
    is_next: bool
    """Whether it is the next step to be trained."""
    refused: list[tuple[SampleGroup, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.context.config.rollout_batch_size

    @property
    def oldest_allowed(self) -> int:
        """Older versions are stale when this step is trained."""
        return self.context.version - self.context.max_staleness


@dataclass(frozen=True, slots=True, eq=False)
class NextStep:
    """Event: a step has become the next to be trained."""

    order: StepRequest


class GroupPool(Collector[RolloutContext]):
    """The pool of a run. It counts groups from when they leave the buffer until a step takes them."""

    def __init__(self) -> None:
        self._orders: list[StepRequest] = []
        self._turns = asyncio.Lock()
        self._running: dict[asyncio.Task[SampleGroup], PooledGroup] = {}
        self._ready: deque[Finished] = deque()
        self._news: asyncio.Queue[asyncio.Task[SampleGroup] | StepRequest | NextStep] = asyncio.Queue()
        """Events: groups that have ended, steps that have begun, and steps that are next."""
        self._early: list[asyncio.Task[SampleGroup] | StepRequest | NextStep] = []
        """Events that arrived before their turn in a replay."""
        self._broken: list[StepRequest] = []
        """Aborted steps whose rejected groups have not been reported to observers."""
        self._last: StepRequest | None = None
        self.record = PoolRecord()
        """Records the order of events, or replays a recorded order."""

    async def collect(self, step: int, context: RolloutContext) -> list[SampleGroup]:
        order = self._last = StepRequest(step, context, is_next=context.is_next is None)
        in_flight = context.config.in_flight
        self._news.put_nowait(order)
        if context.is_next is not None:
            context.is_next.add_done_callback(lambda _: self._news.put_nowait(NextStep(order)))
        try:
            async with self._turns:
                taken = await self._fill(order)
        except BaseException as error:
            self._broken.append(order)
            if not in_flight:
                with held() as failed:
                    await self.flush_to_buffer(graceful=False)
                if failed.error is not None:
                    # It may have the same cause, a lost engine.
                    error.add_note(f"Then its groups could not be ended: {failed.error}")
            raise
        finally:
            self._orders = [other for other in self._orders if other is not order]
        if not in_flight:
            await self.flush_to_buffer(graceful=True)
        groups = sorted((finished.group for finished in taken), key=lambda group: group.samples[0].index)
        try:
            context.observe(step, groups, order.refused)
        except BaseException:
            if in_flight:
                self._ready.extendleft(reversed(taken))
            raise
        return groups

    def drain_events(self) -> list[PoolEvent]:
        heard, self.record.heard = self.record.heard, []
        return heard

    def replay_events(self, events: Sequence[CollectorEvent]) -> None:
        self.record.follow(events)

    async def settled(self) -> None:
        await self.record.settled()

    async def flush_to_buffer(self, *, graceful: bool) -> None:
        """Puts all groups back into the buffer: finished ones first, then aborted ones, in the order of their start."""
        if self._last is None:
            return
        try:
            self._report_refused()
        finally:
            # Also if an observer raises, which ends the run.
            await self._empty(self._last, graceful)

    async def _empty(self, order: StepRequest, graceful: bool) -> None:
        members = list(self._running.values())
        items = [self._surplus(order, finished.item, finished.group) for finished in self._ready]
        before = await self._ended(members)
        try:
            await break_off(order.context, [member for member in members if member not in before], graceful)
        finally:
            for member in members:
                member.running.task.cancel()
            await asyncio.gather(*(member.running.task for member in members), return_exceptions=True)
            items += [self._left_over(order, member, ended=member in before) for member in members]
            order.context.buffer.add_samples(items)
            self._running.clear()
            self._ready.clear()
            self._news = asyncio.Queue()
            self._early = []

    def _report_refused(self) -> None:
        """Reports rejected groups of aborted steps. Their prompts are used up, and are not drawn again for the step."""
        broken, self._broken = self._broken, []
        for order in broken:
            if order.refused:
                order.context.observe(order.step, [], order.refused)

    # ---------------------------------------------------------------- filling a step

    async def _fill(self, order: StepRequest) -> list[Finished]:
        """Waits until the step is the next to be trained and enough groups are ready. Returns its groups."""
        waiting, self._ready = self._ready, deque()
        for finished in waiting:
            self._accept(order, finished)
        while order not in self._orders:
            await self._handle_next_event(order)
        while len(self._ready) < order.size or not order.is_next:
            self._admit(order)
            await self._handle_next_event(order)
        return self._take(order)

    def _take(self, order: StepRequest) -> list[Finished]:
        """The groups that the buffer filter chooses, and if they are too few, also those that finished first."""
        ready, context = list(self._ready), order.context
        items = [finished.item.as_surplus(order.step, finished.group) for finished in ready]
        chosen = context.buffer.choose(items, order.size, version=context.version, max_staleness=context.max_staleness)
        taken = list(dict.fromkeys([*chosen, *range(len(ready))]))[: order.size]
        self._ready = deque(finished for place, finished in enumerate(ready) if place not in taken)
        return [ready[place] for place in taken]

    async def _handle_next_event(self, order: StepRequest) -> None:
        news = await self._next_event()
        if isinstance(news, StepRequest):
            self._orders.append(news)
        elif isinstance(news, NextStep):
            news.order.is_next = True
        else:
            self._judge(order, news)

    async def _next_event(self) -> asyncio.Task[SampleGroup] | StepRequest | NextStep:
        """The next event; in a replay, the one that was recorded next."""
        while True:
            due = [news for news in self._early if self.record.expected in (None, self._news_of(news))]
            if due:
                self._early.remove(due[0])
                self.record.note(self._news_of(due[0]))
                return due[0]
            news = await self._news.get()
            if isinstance(news, asyncio.Task) and not news.cancelled() and (error := news.exception()) is not None:
                # It ends the run, also in a replay.
                raise error
            self._early.append(news)

    def _news_of(self, news: asyncio.Task[SampleGroup] | StepRequest | NextStep) -> PoolEvent:
        if isinstance(news, StepRequest):
            return PoolEvent(PoolEventKind.STEP, news.step)
        if isinstance(news, NextStep):
            return PoolEvent(PoolEventKind.TAKE, news.order.step)
        return PoolEvent(PoolEventKind.GROUP, self._running[news].item.prompt.group_index)

    def _admit(self, order: StepRequest) -> None:
        """Starts groups up to the limit: the sizes of the steps in progress, plus over-sampling."""
        config = order.context.config
        while self._orders and (room := self._room(config.wave - config.rollout_batch_size)) > 0:
            items = order.context.take(room)
            if not items:
                if not self._running and len(self._ready) < order.size:
                    raise data_ended(order.step, len(self._ready), config)
                return
            for item in items:
                self._start(order, item.start(order.step))

    def _room(self, over_sampling: int) -> int:
        needed = sum(order.size for order in self._orders)
        return needed + over_sampling - len(self._ready) - len(self._running)

    def _start(self, order: StepRequest, item: BufferItem) -> None:
        if is_stale(item.samples, order.oldest_allowed) and order.context.config.on_stale != "mask_old_spans":
            # Generating the rest would not make it newer.
            if order.context.config.on_stale == "drop":
                order.context.counts["rollout/stale/dropped_groups"] += 1
                return
            order.context.counts["rollout/stale/requeued_groups"] += 1
            item = item.as_returned(order.step)
        assert order.context.runner is not None
        running = order.context.runner.start(item.prompt, item.samples)
        self._running[running.task] = PooledGroup(item, running)
        running.task.add_done_callback(self._news.put_nowait)

    def _judge(self, order: StepRequest, task: asyncio.Task[SampleGroup]) -> None:
        """Accepts a group that has ended, or rejects it and frees its place. Raises the error of its task."""
        context, config = order.context, order.context.config
        group = task.result()
        candidates = len(self._ready) + len(self._running)
        # Filters are user code and may raise, so the group counts as running until they have returned.
        decision = apply_filters(group, context, insufficient=candidates <= order.size)
        member = self._running.pop(task)
        if decision.keep:
            self._accept(order, Finished(member.item, marked(group, decision.masked_indices)))
            return
        order.refused.append((group, decision.reason))
        if should_requeue(group, config):
            context.buffer.add_samples([member.item.as_returned(order.step)])
        if len(self._ready) < order.size:
            check_limit(order.refused, len(self._ready), order.step, config)

    def _accept(self, order: StepRequest, finished: Finished) -> None:
        """Adds it to the ready groups, unless it is stale for this step; then `on_stale` decides."""
        context = order.context
        if not is_stale(finished.group.samples, order.oldest_allowed):
            self._ready.append(finished)
        elif context.config.on_stale == "mask_old_spans":
            group, lost = mask_stale(finished.group, order.oldest_allowed)
            context.counts["rollout/stale/masked_tokens"] += lost
            self._ready.append(Finished(finished.item, group))
        elif context.config.on_stale == "drop":
            context.counts["rollout/stale/dropped_groups"] += 1
        else:
            context.counts["rollout/stale/requeued_groups"] += 1
            context.buffer.add_samples([finished.item.as_returned(order.step)])

    # ---------------------------------------------------------------- aborting

    async def _ended(self, members: Sequence[PooledGroup]) -> set[PooledGroup]:
        """The groups that have ended by themselves. In a replay: waits for those recorded as ended."""
        expected = self.record.expected
        if expected is None or expected.kind is not PoolEventKind.GIVE_BACK:
            ended = {member for member in members if member.running.task.done()}
            generated = {member for member in members if member not in ended and member.running.generated}
        else:
            ended = {member for member in members if member.item.prompt.group_index in expected.ended}
            generated = {member for member in members if member.item.prompt.group_index in expected.generated}
            await asyncio.gather(*(member.running.all_generated.wait() for member in generated))
            await asyncio.gather(*(member.running.task for member in ended), return_exceptions=True)
        self.record.note(PoolEvent(PoolEventKind.GIVE_BACK, ended=indices(ended), generated=indices(generated)))
        return ended

    def _left_over(self, order: StepRequest, member: PooledGroup, *, ended: bool) -> BufferItem:
        """The buffer item of a group that no step has taken. `ended`: whether it ended by itself."""
        context, config = order.context, order.context.config
        task, item, generated = member.running.task, member.item, member.running.generated
        # Cancelled although it was not aborted: a task inside it was cancelled.
        if ended if task.cancelled() else task.exception() is not None:
            context.counts["rollout/failed_groups"] += 1
            return item.as_it_was(order.step)
        if ended:
            group = task.result()
            if is_failed(group) or is_aborted(group):
                return item.as_returned(order.step)
            return self._surplus(order, item, group)
        if context.max_staleness == 0 or not (config.partial_rollout or config.in_flight):
            kept = item.as_returned(order.step)
        elif generated:
            kept = item.as_partial(order.step, generated)
        else:
            kept = item.as_it_was(order.step)
        context.counts["rollout/partial_groups" if kept.samples else "rollout/aborted_groups"] += 1
        return kept

    def _surplus(self, order: StepRequest, item: BufferItem, group: SampleGroup) -> BufferItem:
        order.context.counts["rollout/surplus_groups"] += 1
        keeps = order.context.max_staleness > 0
        return item.as_surplus(order.step, group) if keeps else item.as_returned(order.step)


def indices(members: Iterable[PooledGroup]) -> tuple[int, ...]:
    return tuple(sorted(member.item.prompt.group_index for member in members))


async def break_off(context: RolloutContext, members: Sequence[PooledGroup], graceful: bool) -> None:
    """Aborts the requests of groups. Returns when their tasks have ended or only wait for rewards; soon if not `graceful`."""
    groups = [member.running for member in members if not member.running.generated]
    assert context.runner is not None or not groups
    while running := [group for group in groups if not group.task.done()]:
        assert context.runner is not None
        await context.runner.abort(running)
        await asyncio.wait([group.task for group in running], timeout=ABORT_INTERVAL_S)
        if not graceful:
            # The run ends: what the engines had is aborted by now, and a tool may take as long as it likes.
            return
