"""accepted: the collector of synchronous runs. It submits waves of groups and takes them in the order of submission.

The samples that share a batch change floating-point bits, so a run is repeatable only if neither acceptance nor refilling
depends on which response happens to come first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from slime_core.contracts.collector import Collector
from slime_core.registry.boundary import held
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.groups import RunningGroup, is_aborted
from slime_core.types.buffer_item import BufferItem
from slime_core.types.sample import SampleGroup
from slime_sources.group_filtering import apply_filters, check_limit, data_ended, marked, should_requeue

ABORT_INTERVAL_S: Final = 3.0
"""An abort is repeated until every task has ended, since it misses requests that an engine has not received yet."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A group in flight and the item to put back if it is not used."""

    item: BufferItem
    running: RunningGroup


class AcceptedGroups(Collector[RolloutContext]):
    """Submits a wave, filters its groups in order, and submits more for the rejected ones."""

    async def collect(self, step: int, context: RolloutContext) -> list[SampleGroup]:
        config = context.config
        target = config.rollout_batch_size
        accepted: list[SampleGroup] = []
        refused: list[tuple[SampleGroup, str]] = []
        returned: list[BufferItem] = []
        in_flight: deque[Submitted] = deque()
        error: BaseException | None = None
        try:
            while len(accepted) < target:
                if not in_flight:
                    missing = target - len(accepted)
                    in_flight += self._submit(context, -(-missing * config.wave // target), step, left=len(accepted))
                group = await in_flight[0].running.task
                submitted = in_flight.popleft()
                candidates = len(accepted) + 1 + len(in_flight)
                decision = apply_filters(group, context, insufficient=candidates <= target)
                if decision.keep:
                    accepted.append(marked(group, decision.masked_indices))
                    continue
                refused.append((group, decision.reason))
                if should_requeue(group, config):
                    returned.append(submitted.item.as_returned(step))
                check_limit(refused, len(accepted), step, config)
                if config.refill == "eager":
                    in_flight += self._submit(context, 1, step, left=len(accepted) + len(in_flight))
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                await self._end(context, in_flight, error)
            finally:
                returned += [submitted.item.as_returned(step) for submitted in in_flight]
                context.buffer.add_samples(returned)
        accepted.sort(key=lambda group: group.samples[0].index)
        context.observe(step, accepted, refused)
        return accepted

    def _submit(self, context: RolloutContext, num_groups: int, step: int, *, left: int) -> list[Submitted]:
        items = context.take(num_groups)
        if not items and left < context.config.rollout_batch_size:
            raise data_ended(step, left, context.config)
        assert context.runner is not None
        return [Submitted(item, context.runner.start(item.prompt, item.samples)) for item in items]

    async def _end(self, context: RolloutContext, in_flight: Sequence[Submitted], error: BaseException | None) -> None:
        """Ends the groups in flight. `error`: that of the step, which is raised; an abort may fail for the same cause, a lost
        engine."""
        with held() as failed:
            await self._abort(context, in_flight, wait_for_rewards=error is None)
        if failed.error is None:
            return
        if error is None:
            raise failed.error
        error.add_note(f"Then its requests could not be aborted: {failed.error}")

    async def _abort(self, context: RolloutContext, in_flight: Sequence[Submitted], *, wait_for_rewards: bool) -> None:
        if not in_flight:
            return
        tasks = [submitted.running.task for submitted in in_flight]
        cancelled = wait_for_rewards
        assert context.runner is not None
        try:
            while running := [submitted.running for submitted in in_flight if not submitted.running.task.done()]:
                await context.runner.abort(running)
                await asyncio.wait(tasks, timeout=ABORT_INTERVAL_S)
                if not cancelled:
                    # The run ends: requests are aborted by now, and a reward could take as long as its time limit. Once:
                    # another cancellation would cut what a task cleans up.
                    cancelled = True
                    for task in tasks:
                        task.cancel()
        finally:
            # Those that an abort which failed has not ended.
            for task in tasks:
                if not task.cancelling():
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                context.counts["rollout/failed_groups"] += 1
            elif is_aborted(result):
                context.counts["rollout/aborted_groups"] += 1
            else:
                context.counts["rollout/surplus_groups"] += 1
