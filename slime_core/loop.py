"""The main loop. Synchronous and ahead-of-training runs are one function; `ahead` is how far rollouts run in front.

for each rollout step:
    groups  <- collect                     (started `ahead` steps before)
    report  <- train on them               (version + 1)
    save if due                            (before publishing; a resumed run publishes first)
    publish the new weights to the engines
    evaluate if due
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, replace

from slime_core.buffer.buffer import BufferSnapshot
from slime_core.errors import Interrupted, RolloutsExhausted
from slime_core.session import Session
from slime_core.types.sample import SampleGroup


@dataclass(frozen=True, slots=True)
class Ahead:
    """A rollout step that has been started: its task, and the buffer as it was before."""

    step: int
    task: asyncio.Task[list[SampleGroup]]
    before: BufferSnapshot


class Schedule:
    """Rollout steps under way, oldest first: at most `ahead` beyond the one that is trained."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._started: deque[Ahead] = deque()

    def start_through(self, step: int) -> None:
        """Starts collecting every step up to this one that has not been started."""
        session = self._session
        while session.state.next_collect <= min(step, session.num_rollout - 1):
            number = session.state.next_collect
            before = session.buffer.snapshot()
            self._started.append(Ahead(number, asyncio.create_task(session.collect(number)), before))
            session.state = replace(session.state, next_collect=number + 1)

    def take_up(self, kept: list[list[SampleGroup]]) -> None:
        """Steps that a checkpoint had collected already, oldest first."""
        for offset, groups in enumerate(kept):
            step = self._session.state.rollout_id + offset
            task = asyncio.create_task(asyncio.sleep(0, groups))
            self._started.append(Ahead(step, task, self._session.buffer.snapshot()))

    async def next_groups(self) -> list[SampleGroup]:
        """The oldest step's groups; on failure or interrupt it is put back as if it had never been started."""
        oldest = self._started[0]
        stop = asyncio.create_task(self._session.stop_requested.wait())
        try:
            await asyncio.wait({oldest.task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not oldest.task.done():
                raise Interrupted("interrupted while generating")
            groups = oldest.task.result()
        except BaseException:
            await self.abandon()
            raise
        finally:
            stop.cancel()
        self._started.popleft()
        return groups

    async def drained(self) -> list[list[SampleGroup]]:
        """Waits for everything under way; the groups of steps that are ahead, oldest first."""
        try:
            return [await ahead.task for ahead in self._started]
        except BaseException:
            await self.abandon()
            raise

    async def abandon(self) -> None:
        """Takes back all that is under way: the buffer and the counters are as before the oldest of them."""
        if not self._started:
            return
        tasks = [ahead.task for ahead in self._started]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        session = self._session
        session.buffer.restore(self._started[0].before)
        session.state = replace(session.state, next_collect=self._started[0].step)
        self._started.clear()


async def run_loop(session: Session) -> None:
    """Runs until num_rollout. On Interrupted or an error in the rollouts, what was trained is saved first."""
    config, schedule = session.run.config, Schedule(session)
    schedule.take_up(session.kept_ahead)
    await session.publish()
    await evaluate_at_start(session)
    try:
        while session.state.rollout_id < session.num_rollout:
            step = session.state.rollout_id
            began = time.perf_counter()
            schedule.start_through(step)
            groups = await schedule.next_groups()
            schedule.start_through(step + config.rollout.ahead)
            generated = time.perf_counter()
            report = await session.train(step, groups)
            due = session.is_due(step)
            # Logged before it is saved: a checkpoint never knows of a step that the record does not.
            session.advance(step, report, rollout_s=generated - began, step_s=time.perf_counter() - began)
            ahead = await schedule.drained() if due.save or due.publish else []
            if due.save:
                await session.save(ahead)
            if due.publish:
                await session.publish()
            if due.evaluate:
                await session.evaluate(step)
            session.raise_if_stopped()
    except Exception as error:
        await schedule.abandon()
        await session.save_unsaved()
        if not isinstance(error, RolloutsExhausted) or not session.may_end_early:
            raise
        await session.end_early(str(error))


async def evaluate_at_start(session: Session) -> None:
    """Before the first step; or, resumed, the evaluation that the last checkpoint was taken just before."""
    step = session.state.rollout_id
    first = step == 0 and not session.run.config.eval.skip_eval_before_train
    if first or (step > 0 and session.is_due(step - 1).evaluate):
        await session.evaluate(step - 1)
