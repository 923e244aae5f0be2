"""The kernel's entry: the rollout workers of a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import fields

from slime_core.config.bound import BoundRun
from slime_core.config.part import PluginSpec
from slime_core.rollout.groups import GroupRunner, all_or_none
from slime_core.rollout.served_engines import ServedEngines
from slime_core.workers.agreement import Agreement
from slime_rollout_workers.link import Link
from slime_rollout_workers.messages import WorkerSetup
from slime_rollout_workers.remote_runner import RemoteRunner, Shares


class WorkerProcesses:
    """`slime_core.workers.rollout_workers.RolloutWorkers` as processes on the driver's machine."""

    def __init__(
        self, run: BoundRun, agreement: Agreement, faults: Counter[str], on_blocked: Callable[[float, str], None]
    ) -> None:
        rollout = run.config.rollout
        self._links = [
            Link(
                worker_setup(run, agreement, number),
                max_losses=rollout.max_retries,
                faults=faults,
                on_blocked=on_blocked,
            )
            for number in range(rollout.rollout_workers)
        ]
        self._shares = Shares(self._links)

    async def start(self, served: Callable[[], Awaitable[ServedEngines | None]]) -> None:
        await all_or_none([asyncio.create_task(link.start(served)) for link in self._links])

    def runner(self, own: GroupRunner, generate: PluginSpec) -> GroupRunner:
        given = {field.name: getattr(own, field.name) for field in fields(own)}
        return RemoteRunner(**given, shares=self._shares, generate=generate.to_json())

    async def stop(self) -> None:
        await asyncio.gather(*(link.stop() for link in self._links))


def worker_setup(run: BoundRun, agreement: Agreement, number: int) -> WorkerSetup:
    rollout = run.config.rollout
    generators = (run.generate, *(part for e in run.evals if (part := e.generate) is not None))
    return WorkerSetup(
        number=number,
        agreement=agreement,
        engine=run.engine.spec(),
        model_path=run.config.model.hf_checkpoint,
        trust_remote_code=run.config.model.trust_remote_code,
        generators=tuple({part.spec().to_json(): part.spec() for part in generators}.values()),
        rewards=tuple(part.spec() for part in run.reward_parts),
        reward_workers=rollout.reward_workers,
        reward_timeout=rollout.reward_timeout,
        max_calls=rollout.concurrency * run.config.launcher.num_engines,
        timeout=rollout.rollout_worker_timeout,
    )


def rollout_workers(
    run: BoundRun, agreement: Agreement, faults: Counter[str], on_blocked: Callable[[float, str], None]
) -> WorkerProcesses:
    """Found by the kernel in the group `slime.library`. Starts nothing yet."""
    return WorkerProcesses(run, agreement, faults, on_blocked)
