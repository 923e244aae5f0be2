"""pool: groups of all steps together. Those that finish first are trained first, or those that the buffer filter chooses;
what a step leaves over goes on.

Where weights are published in flight, several steps are collected at once. Each is filled when it is the next to be trained,
and their sizes together bound what is accepted or running, which is the admission rule of docs/adr/0011. Else a step ends
by breaking off what it did not need.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from slime_core.contracts.collector import Collector, CollectorEvent
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.group_filtering import check_limit, data_ended, goes_back, marked, verdict
from slime_core.rollout.groups import RunningGroup, is_aborted, is_failed
from slime_core.types.buffer_item import BufferItem
from slime_core.types.sample import SampleGroup
from slime_sources.pool_events import News, NewsKind, PoolRecord
from slime_sources.staleness import is_stale, mask_stale

ABORT_INTERVAL_S: Final = 3.0
"""An abort is repeated until every task has ended: one may have missed a request on its way to an engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A group that runs or has finished, and the item that it was made from."""

    item: BufferItem
    running: RunningGroup


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """An accepted group that no step has taken yet."""

    item: BufferItem
    group: SampleGroup


@dataclass(slots=True, eq=False)
class Order:
    """A step that is being collected."""

    step: int
    context: RolloutContext
    wanted: bool
    """It is the next to be trained."""
    refused: list[tuple[SampleGroup, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.context.config.rollout_batch_size

    @property
    def oldest_allowed(self) -> int:
        """Older versions are stale when this step is trained."""
        return self.context.version - self.context.max_staleness


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A step has become the next to be trained."""

    order: Order


class GroupPool(Collector[RolloutContext]):
    """One for the whole run. Groups are counted from when they are taken out of the buffer until a step takes them."""

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._turns = asyncio.Lock()
        self._running: dict[asyncio.Task[SampleGroup], Member] = {}
        self._ready: deque[Finished] = deque()
        self._news: asyncio.Queue[asyncio.Task[SampleGroup] | Order | Wanted] = asyncio.Queue()
        """Groups that have ended, steps that have begun, and steps that are next."""
        self._early: list[asyncio.Task[SampleGroup] | Order | Wanted] = []
        """News that in a replay are not due yet."""
        self._broken: list[Order] = []
        """Steps that were broken off, whose refused groups nobody has been told of."""
        self._last: Order | None = None
        self.record = PoolRecord()
        """The order of what it hears, or the one to keep to."""

    async def collect(self, step: int, context: RolloutContext) -> list[SampleGroup]:
        order = self._last = Order(step, context, wanted=context.wanted is None)
        in_flight = context.config.in_flight
        self._news.put_nowait(order)
        if context.wanted is not None:
            context.wanted.add_done_callback(lambda _: self._news.put_nowait(Wanted(order)))
        try:
            async with self._turns:
                taken = await self._fill(order)
        except BaseException:
            self._broken.append(order)
            if not in_flight:
                await self.give_back(patient=False)
            raise
        finally:
            self._orders = [other for other in self._orders if other is not order]
        if not in_flight:
            await self.give_back(patient=True)
        groups = sorted((finished.group for finished in taken), key=lambda group: group.samples[0].index)
        try:
            context.observe(step, groups, order.refused)
        except BaseException:
            if in_flight:
                self._ready.extendleft(reversed(taken))
            raise
        return groups

    def recorded(self) -> list[News]:
        heard, self.record.heard = self.record.heard, []
        return heard

    def follow(self, events: Sequence[CollectorEvent]) -> None:
        self.record.follow(events)

    async def settled(self) -> None:
        await self.record.settled()

    async def give_back(self, *, patient: bool) -> None:
        """Finished groups first, then what was broken off, in the order in which it was started."""
        if self._last is None:
            return
        try:
            self._tell_of_refused()
        finally:
            # Whoever is told may be what ends the run.
            await self._empty(self._last, patient)

    async def _empty(self, order: Order, patient: bool) -> None:
        members = list(self._running.values())
        items = [self._surplus(order, finished.item, finished.group) for finished in self._ready]
        before = await self._ended(members)
        try:
            await break_off(order.context, [member for member in members if member not in before], patient)
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

    def _tell_of_refused(self) -> None:
        """Their prompts are used up: the step that is collected anew does not see them again."""
        broken, self._broken = self._broken, []
        for order in broken:
            if order.refused:
                order.context.observe(order.step, [], order.refused)

    # ---------------------------------------------------------------- filling a step

    async def _fill(self, order: Order) -> list[Finished]:
        """As many groups as the step takes, once it is the next to be trained."""
        waiting, self._ready = self._ready, deque()
        for finished in waiting:
            self._accept(order, finished)
        while order not in self._orders:
            await self._go_on(order)
        while len(self._ready) < order.size or not order.wanted:
            self._admit(order)
            await self._go_on(order)
        return self._take(order)

    def _take(self, order: Order) -> list[Finished]:
        """As the buffer filter chooses; where it chooses too few, those that finished first."""
        ready, context = list(self._ready), order.context
        items = [finished.item.as_surplus(order.step, finished.group) for finished in ready]
        chosen = context.buffer.choose(items, order.size, version=context.version, max_staleness=context.max_staleness)
        taken = list(dict.fromkeys([*chosen, *range(len(ready))]))[: order.size]
        self._ready = deque(finished for place, finished in enumerate(ready) if place not in taken)
        return [ready[place] for place in taken]

    async def _go_on(self, order: Order) -> None:
        news = await self._hear()
        if isinstance(news, Order):
            self._orders.append(news)
        elif isinstance(news, Wanted):
            news.order.wanted = True
        else:
            self._judge(order, news)

    async def _hear(self) -> asyncio.Task[SampleGroup] | Order | Wanted:
        """The next news; in a replay, those that were the next then."""
        while True:
            due = [news for news in self._early if self.record.expected in (None, self._news_of(news))]
            if due:
                self._early.remove(due[0])
                self.record.note(self._news_of(due[0]))
                return due[0]
            news = await self._news.get()
            if isinstance(news, asyncio.Task) and not news.cancelled() and (error := news.exception()) is not None:
                # It ends the run, now as then.
                raise error
            self._early.append(news)

    def _news_of(self, news: asyncio.Task[SampleGroup] | Order | Wanted) -> News:
        if isinstance(news, Order):
            return News(NewsKind.STEP, news.step)
        if isinstance(news, Wanted):
            return News(NewsKind.TAKE, news.order.step)
        return News(NewsKind.GROUP, self._running[news].item.prompt.group_index)

    def _admit(self, order: Order) -> None:
        """Starts as many groups as the steps under way, and over-sampling, leave room for."""
        config = order.context.config
        while self._orders and (room := self._room(config.wave - config.rollout_batch_size)) > 0:
            items = order.context.take(room)
            if not items:
                if not self._running and len(self._ready) < order.size:
                    raise data_ended(order.step, len(self._ready), config)
                return
            for item in items:
                self._start(order, item.begun(order.step))

    def _room(self, over_sampling: int) -> int:
        wanted = sum(order.size for order in self._orders)
        return wanted + over_sampling - len(self._ready) - len(self._running)

    def _start(self, order: Order, item: BufferItem) -> None:
        if is_stale(item.samples, order.oldest_allowed) and order.context.config.on_stale != "mask_old_spans":
            # It could only get older.
            if order.context.config.on_stale == "drop":
                order.context.counts["rollout/stale/dropped_groups"] += 1
                return
            order.context.counts["rollout/stale/requeued_groups"] += 1
            item = item.as_returned(order.step)
        assert order.context.runner is not None
        running = order.context.runner.start(item.prompt, item.samples)
        self._running[running.task] = Member(item, running)
        running.task.add_done_callback(self._news.put_nowait)

    def _judge(self, order: Order, task: asyncio.Task[SampleGroup]) -> None:
        """A group that has ended is accepted, or its place becomes free. Raises what its task raised."""
        context, config = order.context, order.context.config
        group = task.result()
        candidates = len(self._ready) + len(self._running)
        # Filters are foreign code: until they have said what they think of it, it belongs to what is under way.
        decision = verdict(group, context, insufficient=candidates <= order.size)
        member = self._running.pop(task)
        if decision.keep:
            self._accept(order, Finished(member.item, marked(group, decision.untrained)))
            return
        order.refused.append((group, decision.reason))
        if goes_back(group, config):
            context.buffer.add_samples([member.item.as_returned(order.step)])
        if len(self._ready) < order.size:
            check_limit(order.refused, len(self._ready), order.step, config)

    def _accept(self, order: Order, finished: Finished) -> None:
        """Puts it beside those that wait for a step, unless it is too old for this one."""
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

    # ---------------------------------------------------------------- breaking off

    async def _ended(self, members: Sequence[Member]) -> set[Member]:
        """Those that ended by themselves; in a replay, those that had done so, and they are waited for."""
        expected = self.record.expected
        if expected is None or expected.kind is not NewsKind.GIVE_BACK:
            ended = {member for member in members if member.running.task.done()}
            generated = {member for member in members if member not in ended and member.running.generated}
        else:
            ended = {member for member in members if member.item.prompt.group_index in expected.ended}
            generated = {member for member in members if member.item.prompt.group_index in expected.generated}
            await asyncio.gather(*(member.running.all_generated.wait() for member in generated))
            await asyncio.gather(*(member.running.task for member in ended), return_exceptions=True)
        self.record.note(News(NewsKind.GIVE_BACK, ended=indices(ended), generated=indices(generated)))
        return ended

    def _left_over(self, order: Order, member: Member, *, ended: bool) -> BufferItem:
        """What the buffer gets of a group that no step has taken. `ended`: by itself."""
        context, config = order.context, order.context.config
        task, item, generated = member.running.task, member.item, member.running.generated
        # By itself cancelled: something in it was, which nobody here asked for.
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
            kept = item.as_broken_off(order.step, generated)
        else:
            kept = item.as_it_was(order.step)
        context.counts["rollout/partial_groups" if kept.samples else "rollout/aborted_groups"] += 1
        return kept

    def _surplus(self, order: Order, item: BufferItem, group: SampleGroup) -> BufferItem:
        order.context.counts["rollout/surplus_groups"] += 1
        keeps = order.context.max_staleness > 0
        return item.as_surplus(order.step, group) if keeps else item.as_returned(order.step)


def indices(members: Iterable[Member]) -> tuple[int, ...]:
    return tuple(sorted(member.item.prompt.group_index for member in members))


async def break_off(context: RolloutContext, members: Sequence[Member], patient: bool) -> None:
    """Ends their requests. Returns when their tasks have ended or wait for nothing but rewards; not `patient`: soon."""
    groups = [member.running for member in members if not member.running.generated]
    assert context.runner is not None or not groups
    while running := [group for group in groups if not group.task.done()]:
        assert context.runner is not None
        await context.runner.abort(running)
        await asyncio.wait([group.task for group in running], timeout=ABORT_INTERVAL_S)
        if not patient:
            # The run ends: what the engines had is aborted by now, and a tool may take as long as it likes.
            return
