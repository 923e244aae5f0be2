"""The main loop. Synchronous and asynchronous runs use one function; rollouts run `max_async_level` steps ahead of training.

for each rollout step:
    groups  <- collect                     (started up to `max_async_level` steps before)
    report  <- train on them               (version + 1)
    save if due                            (before the weight update; a resumed run updates weights first)
    update the engines' weights            (between two steps' rollouts, or while they are under way)
    evaluate if due                        (and wait for it, or continue)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from dataclasses import dataclass, replace

from slime_core.controller.saving import CheckpointSaver
from slime_core.controller.session import Session
from slime_core.data.buffer import BufferSnapshot
from slime_core.errors import (
    EngineError,
    PluginError,
    RolloutError,
    RolloutsExhausted,
    SlimeError,
    TrainingError,
)
from slime_core.types.sample import SampleGroup


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A rollout step that is under way."""

    step: int
    task: asyncio.Task[list[SampleGroup]]
    is_next: asyncio.Future[None]
    """Done when the step is the next to be trained."""


class RolloutPrefetcher:
    """Rollout steps under way, oldest first: at most `max_async_level` beyond the one that is trained.

    Steps are collected one after the other; side by side where weights are updated in flight and the collector pools
    groups of several steps.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._started: deque[PendingStep] = deque()
        self._taken: PendingStep | None = None
        """The step that is trained, or was trained last."""
        self._before: dict[int, BufferSnapshot] = {}
        """The buffer as it was when the collection of a step began."""
        self.in_flight = session.run.config.rollout.in_flight
        self.pooled = self.in_flight and session.run.collector.driver.across_steps

    @property
    def has_started(self) -> bool:
        """True if there is a step that `next_groups` would return."""
        return bool(self._started)

    def start_through(self, step: int) -> None:
        """Starts collecting every step up to this one that has not been started."""
        session = self._session
        while session.state.next_collect <= min(step, session.num_rollout - 1):
            number = session.state.next_collect
            previous = self._started[-1].task if self._started and not self.pooled else None
            is_next = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._collect(number, previous, is_next if self.pooled else None))
            self._started.append(PendingStep(number, task, is_next))
            session.state = replace(session.state, next_collect=number + 1)

    async def _collect(
        self, step: int, previous: asyncio.Task[list[SampleGroup]] | None, is_next: asyncio.Future[None] | None
    ) -> list[SampleGroup]:
        if previous is not None:
            await asyncio.wait({previous})
            previous.result()
        self._before[step] = self._session.buffer.snapshot()
        return await self._session.collect(step, is_next)

    def restore(self, kept: list[list[SampleGroup]]) -> None:
        """Adds steps that a checkpoint holds as collected, oldest first."""
        for offset, groups in enumerate(kept):
            step = self._session.state.rollout_id + offset
            is_next = asyncio.get_running_loop().create_future()
            self._started.append(PendingStep(step, asyncio.create_task(asyncio.sleep(0, groups)), is_next))
            self._before[step] = self._session.buffer.snapshot()

    async def next_groups(self) -> list[SampleGroup]:
        """The oldest step's groups. Interrupted if the run is asked to stop before they are there."""
        oldest = self._started[0]
        if not oldest.is_next.done():
            oldest.is_next.set_result(None)
        await self._session.wait_unless_stopped(oldest.task, doing="generating")
        groups = collected(oldest)
        self._taken = self._started.popleft()
        self._before.pop(oldest.step)
        return groups

    async def wait_idle(self) -> None:
        """Waits for everything under way; a failure is raised when its step is the next to be trained. Interrupted if the run
        is asked to stop before."""
        for ahead in self._started:
            with self._session.times.of("drain"):
                await self._session.wait_unless_stopped(ahead.task, doing="generating")

    async def quiesce(self) -> list[list[SampleGroup]]:
        """Stops all collection for a checkpoint. Returns the groups of the complete steps ahead, oldest first; all other
        groups are in the buffer. The run then continues exactly as a run that resumes from the checkpoint."""
        if self.pooled:
            with self._session.times.of("drain"):
                await self._settled()
                await self._break_off(graceful=True)
            return [ahead.task.result() for ahead in self._started]
        await self.wait_idle()
        failed = [ahead for ahead in self._started if not succeeded(ahead.task)]
        self._keep_complete()
        groups = [ahead.task.result() for ahead in self._started]
        if failed:
            # A run that resumes from the checkpoint collects it again. Here its error is raised in its turn, and no step
            # begins behind it.
            self._started.append(failed[0])
        return groups

    async def _settled(self) -> None:
        """In a replay, waits until all recorded events have happened. Raises the error of a step, and Interrupted if the run
        is asked to stop, since further events may never happen then."""
        settling = asyncio.create_task(self._session.settled())
        try:
            while True:
                for ahead in self._started:
                    if ahead.task.done():
                        collected(ahead)
                if settling.done():
                    return
                unfinished = {ahead.task for ahead in self._started if not ahead.task.done()}
                await self._session.wait_unless_stopped(settling, *unfinished, doing="waiting for what was recorded")
        finally:
            settling.cancel()

    async def cancel_pending(self, *, discard_groups: bool = False) -> list[list[SampleGroup]]:
        """Cancels all collection; like `quiesce`, as far as the engines respond. The groups of a step that was taken and has
        begun no optimizer step count as collected ahead again. `discard_groups`: drop these groups and regenerate their
        prompts."""
        session, taken, self._taken = self._session, self._taken, None
        if taken is not None and taken.step == session.state.rollout_id and session.optimizer_idle.is_set():
            self._started.appendleft(taken)
        else:
            discard_groups = False
        if self.pooled:
            # Everything is in the buffer by then. Engines that do not respond have lost their requests, and an observer's
            # error may be what ends the run: only the error that ended the run is raised.
            with contextlib.suppress(EngineError, PluginError):
                await self._break_off(graceful=False)
        else:
            await self._cancel(self._started)
            self._keep_complete()
        if discard_groups:
            # A checkpoint that held them would be of no use: a run that resumes from it would be refused again.
            for ahead in self._started:
                session.requeue_groups(ahead.step, ahead.task.result(), kept=False)
            session.state = replace(session.state, next_collect=session.state.rollout_id)
            self._started.clear()
        return [ahead.task.result() for ahead in self._started]

    def _keep_complete(self) -> None:
        """Keeps the steps before the first incomplete one; restores the buffer and the counters to before that one."""
        complete = deque(itertools.takewhile(lambda ahead: succeeded(ahead.task), self._started))
        if len(complete) == len(self._started):
            return
        session, broken = self._session, self._started[len(complete)].step
        if broken in self._before:
            session.buffer.restore(self._before[broken])
        session.state = replace(session.state, next_collect=broken)
        self._started = complete

    async def _break_off(self, *, graceful: bool) -> None:
        """Keeps only complete steps; the collector puts everything else into the buffer."""
        session = self._session
        await self._cancel(self._started)
        self._started = deque(ahead for ahead in self._started if succeeded(ahead.task))
        following = self._started[-1].step + 1 if self._started else session.state.rollout_id
        session.state = replace(session.state, next_collect=following)
        await session.collector.flush_to_buffer(graceful=graceful)

    async def _cancel(self, under_way: deque[PendingStep]) -> None:
        tasks = [ahead.task for ahead in under_way]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def collected(ahead: PendingStep) -> list[SampleGroup]:
    """The groups of a step whose collection has ended; raises its error."""
    if ahead.task.cancelled():
        # Propagated, the cancellation would end the run without an error and without saving, as if it had been interrupted.
        raise RolloutError(
            f"step {ahead.step}: its collection was cancelled from within: by a reward, a filter, a generator or a middleware."
        )
    return ahead.task.result()


def succeeded(task: asyncio.Task[list[SampleGroup]]) -> bool:
    return not task.cancelled() and task.exception() is None


async def run_loop(session: Session) -> None:
    """Runs until num_rollout. On Interrupted or an error in the rollouts, what was trained is saved first."""
    config, schedule, saving = session.run.config, RolloutPrefetcher(session), CheckpointSaver(session)
    schedule.restore(session.kept_ahead)
    await session.update_weights()
    await evaluate_at_start(session)
    session.begin_steps()
    try:
        while session.state.rollout_id < session.num_rollout:
            step = session.state.rollout_id
            with session.times.of("rollout"):
                schedule.start_through(step + config.rollout.max_async_level if schedule.pooled else step)
                groups = await schedule.next_groups()
                schedule.start_through(step + config.rollout.max_async_level)
            report = await session.train(step, groups)
            due = session.is_due(step)
            # Logged before it is saved: a checkpoint never holds a step that was not logged, unless logging it raised an error.
            session.advance(step, report)
            await saving.keep_schedule()
            if report.stuck is not None:
                # Only now: the step counts as trained, and what was changed before it is saved.
                raise TrainingError(report.stuck)
            if due.save:
                await session.evaluated()
                # Also if a run that resumes from there evaluates after other steps, or ends later.
                session.state = replace(session.state, eval_owed=due.evaluate)
                ahead = await schedule.quiesce()
                with session.times.of("save"):
                    await saving.save(ahead)
            if due.update_weights:
                if not schedule.in_flight:
                    await schedule.wait_idle()
                if config.eval.eval_blocks_weight_update:
                    await session.evaluated()
                await session.update_weights()
            if due.evaluate:
                await session.evaluate(step)
            await saving.raise_if_failed()
            session.raise_if_stopped()
        await session.evaluated()
        await saving.completed()
    except Exception as error:
        ahead = await schedule.cancel_pending(discard_groups=isinstance(error, RolloutError | TrainingError))
        await session.end_evaluation()
        if isinstance(error, EngineError) and session.client is not None:
            # Pending requests must fail now, so that the engines that are left can be offloaded for the checkpoint.
            session.client.fail(error)
        try:
            await saving.save_unsaved(ahead, after=error)
        except SlimeError as unsaved:
            if str(error) not in str(unsaved):
                unsaved.args = (f"{unsaved} The run had ended before that, with: {error}",)
            raise
        if not isinstance(error, RolloutsExhausted) or not session.may_end_early:
            raise
        await session.end_early(str(error))
    finally:
        await schedule.cancel_pending()
        await session.end_evaluation()
        await saving.give_up()


async def evaluate_at_start(session: Session) -> None:
    """Evaluates before the first step. In a resumed run: makes the evaluation that was due after the last checkpoint, or
    repeats one on the side that was cancelled."""
    step = session.state.rollout_id
    first = step == 0 and not session.run.config.eval.skip_eval_before_train
    if first or (step > 0 and (session.is_due(step - 1).evaluate or session.state.eval_owed)):
        await session.evaluate(step - 1)
