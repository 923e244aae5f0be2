"""The main loop. Synchronous and asynchronous runs are one function; `ahead` is how far rollouts run in front.

for each rollout step:
    groups  <- collect                     (started up to `ahead` steps before)
    report  <- train on them               (version + 1)
    save if due                            (before publishing; a resumed run publishes first)
    publish the new weights to the engines (between two steps' rollouts, or while they are under way)
    evaluate if due                        (and wait for it, or go on)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from dataclasses import dataclass, replace

from slime_core.controller.saving import Saving
from slime_core.controller.session import Session
from slime_core.data.buffer import BufferSnapshot
from slime_core.errors import EngineError, Interrupted, PluginError, RolloutError, RolloutsExhausted, TrainingError
from slime_core.types.sample import SampleGroup


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """A rollout step that is under way."""

    step: int
    task: asyncio.Task[list[SampleGroup]]
    wanted: asyncio.Future[None]
    """Done when it is the next to be trained."""


class Schedule:
    """Rollout steps under way, oldest first: at most `ahead` beyond the one that is trained.

    Steps are collected one after the other; side by side where weights are published in flight and the collector pools
    groups of several steps.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._started: deque[Ahead] = deque()
        self._taken: Ahead | None = None
        """The one that is trained, or was last."""
        self._before: dict[int, BufferSnapshot] = {}
        """The buffer as it was when the collection of a step began."""
        self.in_flight = session.run.config.rollout.in_flight
        self.pooled = self.in_flight and session.run.collector.driver.across_steps

    def start_through(self, step: int) -> None:
        """Starts collecting every step up to this one that has not been started."""
        session = self._session
        while session.state.next_collect <= min(step, session.num_rollout - 1):
            number = session.state.next_collect
            previous = self._started[-1].task if self._started and not self.pooled else None
            wanted = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._collect(number, previous, wanted if self.pooled else None))
            self._started.append(Ahead(number, task, wanted))
            session.state = replace(session.state, next_collect=number + 1)

    async def _collect(
        self, step: int, previous: asyncio.Task[list[SampleGroup]] | None, wanted: asyncio.Future[None] | None
    ) -> list[SampleGroup]:
        if previous is not None:
            await asyncio.wait({previous})
            previous.result()
        self._before[step] = self._session.buffer.snapshot()
        return await self._session.collect(step, wanted)

    def take_up(self, kept: list[list[SampleGroup]]) -> None:
        """Steps that a checkpoint had collected already, oldest first."""
        for offset, groups in enumerate(kept):
            step = self._session.state.rollout_id + offset
            wanted = asyncio.get_running_loop().create_future()
            self._started.append(Ahead(step, asyncio.create_task(asyncio.sleep(0, groups)), wanted))
            self._before[step] = self._session.buffer.snapshot()

    async def next_groups(self) -> list[SampleGroup]:
        """The oldest step's groups. Interrupted if the run is asked to stop before they are there."""
        oldest = self._started[0]
        oldest.wanted.set_result(None)
        stop = asyncio.create_task(self._session.stop_requested.wait())
        try:
            await asyncio.wait({oldest.task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not oldest.task.done():
                raise Interrupted("interrupted while generating")
            groups = collected(oldest)
        finally:
            stop.cancel()
        self._taken = self._started.popleft()
        self._before.pop(oldest.step)
        return groups

    async def drained(self) -> None:
        """Waits for everything under way; what failed is told when it is the next to be trained. Interrupted if the run is
        asked to stop before."""
        stop = asyncio.create_task(self._session.stop_requested.wait())
        try:
            for ahead in self._started:
                await asyncio.wait({ahead.task, stop}, return_when=asyncio.FIRST_COMPLETED)
                if not ahead.task.done():
                    raise Interrupted("interrupted while generating")
        finally:
            stop.cancel()

    async def at_rest(self) -> list[list[SampleGroup]]:
        """For a checkpoint: nothing runs, and what is not in the buffer is in the groups of the steps ahead that are
        complete, oldest first. The run goes on from there as one that is resumed does."""
        if self.pooled:
            await self._settled()
            await self._break_off(patient=True)
            return [ahead.task.result() for ahead in self._started]
        await self.drained()
        failed = [ahead for ahead in self._started if not succeeded(ahead.task)]
        self._keep_complete()
        groups = [ahead.task.result() for ahead in self._started]
        if failed:
            # Whoever goes on from the checkpoint collects it again. Here it is told in its turn, and none begins behind it.
            self._started.append(failed[0])
        return groups

    async def _settled(self) -> None:
        """In a replay, waits until nothing more is to happen before everything is broken off. Raises what a step has raised,
        and Interrupted if the run is asked to stop: nothing more might happen then."""
        settling = asyncio.create_task(self._session.settled())
        stop = asyncio.create_task(self._session.stop_requested.wait())
        steps = {ahead.task for ahead in self._started}
        try:
            while not settling.done():
                unfinished = {task for task in steps if not task.done()}
                await asyncio.wait({settling, stop, *unfinished}, return_when=asyncio.FIRST_COMPLETED)
                for ahead in self._started:
                    if ahead.task.done():
                        collected(ahead)
                if stop.done() and not settling.done():
                    raise Interrupted("interrupted while waiting for what was recorded")
        finally:
            settling.cancel()
            stop.cancel()

    async def abandon(self, *, refused: bool = False) -> list[list[SampleGroup]]:
        """Ends all that is under way; as `at_rest`, as far as the engines can be asked. Groups that were taken and that the
        trainers have not begun to train are those of a step ahead again; `refused`: they are to blame, and are generated
        anew."""
        session, taken, self._taken = self._session, self._taken, None
        if taken is not None and taken.step == session.state.rollout_id and session.between_steps.is_set():
            self._started.appendleft(taken)
        else:
            refused = False
        if self.pooled:
            # Everything is in the buffer by then. Engines that cannot be asked have lost what they had, and observers may be
            # what ends the run: the error that does is the one to tell.
            with contextlib.suppress(EngineError, PluginError):
                await self._break_off(patient=False)
        else:
            await self._cancel(self._started)
            self._keep_complete()
        if refused:
            # A checkpoint that held them would be of no use: whoever goes on from it is refused again.
            for ahead in self._started:
                session.put_back(ahead.step, ahead.task.result(), kept=False)
            session.state = replace(session.state, next_collect=session.state.rollout_id)
            self._started.clear()
        return [ahead.task.result() for ahead in self._started]

    def _keep_complete(self) -> None:
        """Steps before the first that is not complete stay; the buffer and the counters are as before that one."""
        complete = deque(itertools.takewhile(lambda ahead: succeeded(ahead.task), self._started))
        if len(complete) == len(self._started):
            return
        session, broken = self._session, self._started[len(complete)].step
        if broken in self._before:
            session.buffer.restore(self._before[broken])
        session.state = replace(session.state, next_collect=broken)
        self._started = complete

    async def _break_off(self, *, patient: bool) -> None:
        """Only complete steps stay; the collector gives everything else to the buffer."""
        session = self._session
        await self._cancel(self._started)
        self._started = deque(ahead for ahead in self._started if succeeded(ahead.task))
        following = self._started[-1].step + 1 if self._started else session.state.rollout_id
        session.state = replace(session.state, next_collect=following)
        await session.collector.give_back(patient=patient)

    async def _cancel(self, under_way: deque[Ahead]) -> None:
        tasks = [ahead.task for ahead in under_way]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def collected(ahead: Ahead) -> list[SampleGroup]:
    """What its collection, which has ended, gave or raised."""
    if ahead.task.cancelled():
        # Passed on, it would end the run without a word and without saving, as if somebody had asked for that.
        raise RolloutError(
            f"step {ahead.step}: its collection was cancelled from within: by a reward, a filter, a generator or a middleware."
        )
    return ahead.task.result()


def succeeded(task: asyncio.Task[list[SampleGroup]]) -> bool:
    return not task.cancelled() and task.exception() is None


async def run_loop(session: Session) -> None:
    """Runs until num_rollout. On Interrupted or an error in the rollouts, what was trained is saved first."""
    config, schedule, saving = session.run.config, Schedule(session), Saving(session)
    schedule.take_up(session.kept_ahead)
    await session.publish()
    await evaluate_at_start(session)
    try:
        while session.state.rollout_id < session.num_rollout:
            step = session.state.rollout_id
            began = time.perf_counter()
            schedule.start_through(step + config.rollout.ahead if schedule.pooled else step)
            groups = await schedule.next_groups()
            schedule.start_through(step + config.rollout.ahead)
            generated = time.perf_counter()
            report = await session.train(step, groups)
            due = session.is_due(step)
            # Logged before it is saved: a checkpoint never knows of a step that was not logged, or failed to be and said so.
            session.advance(step, report, rollout_s=generated - began, step_s=time.perf_counter() - began)
            await saving.keep_schedule()
            if due.save:
                await session.evaluated()
                # Also where whoever goes on from there evaluates after other steps, or later ends.
                session.state = replace(session.state, eval_owed=due.evaluate)
                await saving.save(await schedule.at_rest())
            if due.publish:
                if not schedule.in_flight:
                    await schedule.drained()
                if config.eval.eval_holds_weights:
                    await session.evaluated()
                await session.publish()
            if due.evaluate:
                await session.evaluate(step)
            await saving.raise_if_failed()
            session.raise_if_stopped()
        await session.evaluated()
        await saving.completed()
    except Exception as error:
        ahead = await schedule.abandon(refused=isinstance(error, RolloutError | TrainingError))
        await session.end_evaluation()
        if isinstance(error, EngineError) and session.client is not None:
            # Those that are left give their devices to what is saved; the others cannot be asked.
            session.client.fail(error)
        await saving.save_unsaved(ahead)
        if not isinstance(error, RolloutsExhausted) or not session.may_end_early:
            raise
        await session.end_early(str(error))
    finally:
        await schedule.abandon()
        await session.end_evaluation()
        await saving.give_up()


async def evaluate_at_start(session: Session) -> None:
    """Before the first step; or, resumed, the evaluation that the last checkpoint was taken just before, or one for that which
    was given up on the side with the steps after it trained already."""
    step = session.state.rollout_id
    first = step == 0 and not session.run.config.eval.skip_eval_before_train
    if first or (step > 0 and (session.is_due(step - 1).evaluate or session.state.eval_owed)):
        await session.evaluate(step - 1)
