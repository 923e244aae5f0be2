"""DriverGroup: the driver's side of a group that a worker has."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from slime_core.registry.boundary import held
from slime_core.rollout.groups import GroupRunner, RunningGroup
from slime_core.types.sample import Sample, SampleGroup
from slime_rollout_workers.columns import GroupColumns
from slime_rollout_workers.flat import unpack_trace
from slime_rollout_workers.messages import Failed, Finished, Generated, StartGroup
from slime_rollout_workers.travelling_error import raised_here


@dataclass(slots=True, kw_only=True, eq=False)
class DriverGroup:
    number: int
    runner: GroupRunner
    pickled: bytes
    """Its `RunnerSetup`."""
    running: RunningGroup
    kept: tuple[Sample, ...] = ()
    score_only: bool = False
    result: asyncio.Future[SampleGroup] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker has nothing of the group any more."""
    losses: int = 0
    """How often its worker has died."""

    def message(self) -> StartGroup:
        prompt = self.running.prompt
        # Of a group that was lost while it waited for rewards, only these are missing.
        kept = self.running.generated or self.kept
        columns = GroupColumns.of(kept, prompt) if kept else None
        return StartGroup(self.number, self.pickled, prompt, columns, self.score_only)

    def take_generated(self, message: Generated) -> None:
        # After a loss, failed responses were generated again.
        self.running.generated[:] = message.samples.samples(self.running.prompt)
        self.running.all_generated.set()

    def take_end(self, message: Finished | Failed) -> None:
        self.ended.set()
        if self.result.done():
            return
        if isinstance(message, Finished):
            with held() as failed:
                samples = message.rewards.applied(self.kept if self.score_only else self.running.generated)
                if message.trace is not None:
                    self.runner.on_trace(unpack_trace(message.trace))
            if failed.error is None:
                self.result.set_result(SampleGroup(prompt=self.running.prompt, samples=samples))
            else:
                # Also an observer's, as where the group is run by the driver.
                self.result.set_exception(failed.error)
        elif message.error is not None:
            self.result.set_exception(raised_here(message.error))
        else:
            self.result.cancel()

    def fail(self, error: Exception) -> None:
        self.ended.set()
        if not self.result.done():
            self.result.set_exception(error)
