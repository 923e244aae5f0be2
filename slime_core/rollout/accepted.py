"""accepted: the kernel's collector. Waves of groups, consumed in the order in which they were submitted.

Order matters for more than tidiness: which samples share a batch changes floating-point bits, so a run is repeatable only
if neither acceptance nor refilling depends on which answer happened to come first.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from slime_core.buffer.item import BufferItem
from slime_core.config.rollout import RolloutConfig
from slime_core.contracts.collector import Collector
from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.errors import RolloutsExhausted
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.groups import RunningGroup, is_aborted, is_failed
from slime_core.types.sample import SampleGroup

ABORT_INTERVAL_S: Final = 3.0
"""An abort is repeated until every task has ended: one may have missed a request on its way to an engine."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A group in flight and the item to give back if it is not used."""

    item: BufferItem
    running: RunningGroup


@dataclass(slots=True)
class Tally:
    """What became of the groups of one step."""

    accepted: list[SampleGroup] = field(default_factory=list)
    refused: list[tuple[SampleGroup, str]] = field(default_factory=list)
    returned: list[BufferItem] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)


class AcceptedGroups(Collector):
    """Submits a wave, judges its groups in order, and submits again for what was rejected."""

    async def collect(self, step: int, context: RolloutContext) -> list[SampleGroup]:
        config = context.config
        target = config.rollout_batch_size
        tally = Tally()
        in_flight: deque[Submitted] = deque()
        complete = False
        try:
            while len(tally.accepted) < target:
                if not in_flight:
                    missing = target - len(tally.accepted)
                    in_flight += self._submit(context, -(-missing * config.wave // target), step)
                group = await in_flight[0].running.task
                submitted = in_flight.popleft()
                decision = self._judge(group, submitted, tally, len(in_flight), step, context)
                if decision.keep:
                    tally.accepted.append(marked(group, decision.untrained))
                    continue
                tally.refused.append((group, decision.reason))
                tally.rejected[decision.reason] += 1
                self._check_limit(tally, step, config)
                if config.refill == "eager":
                    in_flight += self._submit(context, 1, step)
            complete = True
        finally:
            await self._abort(context, in_flight, wait_for_rewards=complete)
            tally.returned += [submitted.item.as_returned(step) for submitted in in_flight]
            context.buffer.add_samples(tally.returned)
        accepted = sorted(tally.accepted, key=lambda group: group.samples[0].index)
        context.observe(step, accepted, tally.refused)
        return accepted

    def _submit(self, context: RolloutContext, num_groups: int, step: int) -> list[Submitted]:
        items = context.buffer.get_samples(num_groups)
        if not items:
            raise RolloutsExhausted(f"step {step}: the data has ended; there is no prompt left to generate from.")
        assert context.runner is not None
        return [Submitted(item, context.runner.start(item.prompt, item.samples)) for item in items]

    def _judge(
        self,
        group: SampleGroup,
        submitted: Submitted,
        tally: Tally,
        num_in_flight: int,
        step: int,
        context: RolloutContext,
    ) -> FilterDecision:
        """Whether the group is accepted; if not, why."""
        if is_failed(group):
            context.counts["rollout/failed_groups"] += 1
            if context.config.on_failed_group == "requeue":
                tally.returned.append(submitted.item.as_returned(step))
            return FilterDecision(keep=False, reason="failed")
        if is_aborted(group):
            # Nobody here asked for it: an engine ended it, and what it has is no answer.
            context.counts["rollout/aborted_groups"] += 1
            tally.returned.append(submitted.item.as_returned(step))
            return FilterDecision(keep=False, reason="aborted")
        candidates = len(tally.accepted) + 1 + num_in_flight
        decision = judge(group, context.filters, insufficient=candidates <= context.config.rollout_batch_size)
        if not decision.keep:
            context.counts[f"rollout/dynamic_filter/drop_{decision.reason}"] += 1
        elif decision.untrained:
            context.counts["rollout/dynamic_filter/untrained_samples"] += len(decision.untrained)
        return decision

    def _check_limit(self, tally: Tally, step: int, config: RolloutConfig) -> None:
        limit = config.max_filtered_groups or 10 * config.rollout_batch_size
        if tally.rejected.total() >= limit:
            reasons = ", ".join(f"{name} {count}" for name, count in tally.rejected.most_common())
            raise RolloutsExhausted(
                f"step {step}: {tally.rejected.total()} groups were rejected while {len(tally.accepted)} of "
                f"{config.rollout_batch_size} were accepted ({reasons}). Look at the filters and the reward, raise "
                "--max-filtered-groups, or let the run end here when nothing is left to learn: --on-exhausted finish."
            )

    async def _abort(self, context: RolloutContext, in_flight: Sequence[Submitted], *, wait_for_rewards: bool) -> None:
        if not in_flight:
            return
        tasks = [submitted.running.task for submitted in in_flight]
        assert context.runner is not None
        while running := [submitted.running for submitted in in_flight if not submitted.running.task.done()]:
            await context.runner.abort(running)
            await asyncio.wait(tasks, timeout=ABORT_INTERVAL_S)
            if not wait_for_rewards:
                # The run ends: what the engines had is aborted by now, and a reward may take as long as its limit.
                for task in tasks:
                    task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException):
                context.counts["rollout/failed_groups"] += 1
            elif is_aborted(result):
                context.counts["rollout/aborted_groups"] += 1
            else:
                context.counts["rollout/surplus_groups"] += 1


def judge(group: SampleGroup, filters: Sequence[GroupFilter], *, insufficient: bool) -> FilterDecision:
    """The decision of the first filter that drops the group; if none does, to keep it, without the samples that any of
    them does not want trained. `insufficient`: too few candidates remain to drop it on a filter's mere preference."""
    untrained: set[int] = set()
    for group_filter in filters:
        decision = group_filter.decide(group)
        if not decision.keep and not (decision.keep_when_insufficient and insufficient):
            return decision
        untrained.update(decision.untrained)
    return FilterDecision(keep=True, untrained=tuple(sorted(untrained)))


def marked(group: SampleGroup, untrained: Sequence[int]) -> SampleGroup:
    """The group in which these samples train nothing."""
    if not untrained:
        return group
    samples = list(group.samples)
    for position in untrained:
        samples[position] = replace(samples[position], remove_sample=True)
    return replace(group, samples=tuple(samples))
