"""RemoteRunner: the kernel's GroupRunner, whose groups run in rollout workers."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from slime_core.rollout.groups import GroupRunner, RunningGroup
from slime_core.types.sample import Sample, SampleGroup
from slime_rollout_workers.driver_group import DriverGroup
from slime_rollout_workers.link import Link
from slime_rollout_workers.messages import RunnerSetup


@dataclass(eq=False, repr=False)
class Shares:
    """The workers of a run, and which groups each has."""

    links: Sequence[Link]
    groups: dict[RunningGroup, tuple[Link, DriverGroup]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def link_of(self, running: RunningGroup) -> Link:
        """Always the same for a prompt: a generator may keep something between its episodes."""
        return self.links[running.prompt.group_index % len(self.links)]


@dataclass(kw_only=True, eq=False, repr=False)
class RemoteRunner(GroupRunner):
    shares: Shares
    generate: str
    """The generator's `PluginSpec` as JSON; `generator` is not opened here."""

    @cached_property
    def pickled(self) -> bytes:
        settings = self.settings if self.rewards is not None else replace(self.settings, scoring=None)
        return pickle.dumps(RunnerSetup(settings=settings, generator=self.generate), pickle.HIGHEST_PROTOCOL)

    async def run(self, running: RunningGroup) -> SampleGroup:
        kept = tuple(sample for samples in running.kept.values() for sample in samples)
        return await self._in_worker(running, self._group(running, kept=kept))

    async def abort(self, groups: Sequence[RunningGroup]) -> None:
        of_link: dict[Link, list[DriverGroup]] = {}
        for running in groups:
            running.stop.set()
            if running in self.shares.groups:
                link, group = self.shares.groups[running]
                of_link.setdefault(link, []).append(group)
        await asyncio.gather(*(link.stop_groups(members) for link, members in of_link.items()))

    async def score(self, group: SampleGroup) -> SampleGroup:
        if self.settings.scoring is None or self.rewards is None:
            return group
        running = RunningGroup(prompt=group.prompt)
        task = asyncio.current_task()
        assert task is not None
        running.task = task
        return await self._in_worker(running, self._group(running, kept=group.samples, score_only=True))

    def _group(self, running: RunningGroup, *, kept: Sequence[Sample], score_only: bool = False) -> DriverGroup:
        return DriverGroup(
            number=next(self.shares.numbers),
            runner=self,
            pickled=self.pickled,
            running=running,
            kept=tuple(kept),
            score_only=score_only,
        )

    async def _in_worker(self, running: RunningGroup, group: DriverGroup) -> SampleGroup:
        link = self.shares.link_of(running)
        self.shares.groups[running] = link, group
        try:
            link.begin(group)
            return await group.result
        except asyncio.CancelledError:
            await link.cancel(group)
            raise
        finally:
            del self.shares.groups[running]
