"""RolloutWorkers: processes with a share of the groups each. A distribution provides them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from slime_core import groups
from slime_core.config.bound import BoundRun
from slime_core.config.part import PluginSpec
from slime_core.rollout.groups import GroupRunner
from slime_core.rollout.served_engines import ServedEngines
from slime_core.workers.agreement import Agreement


class RolloutWorkers(Protocol):
    async def start(self, served: Callable[[], Awaitable[ServedEngines | None]]) -> None:
        """Returns when all have opened generators and built rewards; raises the first error. `served`: what rewards ask."""

    def runner(self, own: GroupRunner, generate: PluginSpec) -> GroupRunner:
        """Runs groups in the workers as `own` would here, where the generator `generate` is not opened."""

    async def stop(self) -> None:
        """Ends the processes, in any state."""


def rollout_workers_of(
    run: BoundRun, agreement: Agreement, faults: Counter[str], on_blocked: Callable[[float, str], None]
) -> RolloutWorkers | None:
    """Nothing is started yet. None: the run has none. faults: metrics of lost workers, for the next step's record. on_blocked:
    called with the seconds that a worker's event loop was blocked, and where."""
    if not run.uses_rollout_workers:
        return None
    where = "rollout.rollout_workers"
    entry = run.registry.find(groups.LIBRARY, "rollout_workers", where=where)
    workers: RolloutWorkers = run.registry.load(entry, where=where)(run, agreement, faults, on_blocked)
    return workers
