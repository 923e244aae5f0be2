"""The controller's side of all four transports; senders on the trainer's ranks send the weights."""

from __future__ import annotations

import time

from slime_core.contracts.transport import EngineGroup, TrainerLink, WeightTransport
from slime_core.errors import EngineError
from slime_core.types.report import WeightUpdateReport


class SenderTransport(WeightTransport):
    async def push(self, trainers: TrainerLink, engines: EngineGroup, version: int) -> WeightUpdateReport:
        """Sends a version to all engines. Raises EngineError if an engine has no address, refuses a bucket, or does not have
        `version` afterwards."""
        started = time.perf_counter()
        found = await engines.call_all("endpoints")
        if not all(found):
            raise EngineError(
                "sync.transport: this transport calls engines over HTTP, but not all of them have an address. Set another "
                "sync.transport; `slime plugins` lists them."
            )
        reports = await trainers.send(version, [endpoint for own in found for endpoint in own])
        buckets = sum(report.buckets for report in reports)
        if not buckets:
            raise EngineError(f"the trainer exported no weights for version {version}.")
        await engines.call_all("commit_weights", version)
        return WeightUpdateReport(
            version=version,
            seconds=time.perf_counter() - started,
            bytes_sent=sum(report.bytes_sent for report in reports),
            buckets=buckets,
            compared_with=next((report.compared_with for report in reports if report.compared_with is not None), None),
            density=next((report.density for report in reports if report.density is not None), None),
        )
