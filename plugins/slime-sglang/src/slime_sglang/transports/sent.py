"""The driver's side of all four transports: senders on the trainer's ranks do the work."""

from __future__ import annotations

import time

from slime_core.contracts.transport import EngineLink, TrainerLink, WeightTransport
from slime_core.errors import EngineError
from slime_core.types.report import PublishReport


class SentTransport(WeightTransport):
    async def push(self, trainers: TrainerLink, engines: EngineLink, version: int) -> PublishReport:
        """EngineError if an engine has no address, does not take a bucket, or does not have `version` afterwards."""
        started = time.perf_counter()
        found = await engines.each("endpoints")
        if not all(found):
            raise EngineError(
                "this weight transport talks to engines over HTTP, and not all of them have an address. Choose another "
                "sync.transport; `slime plugins` lists them."
            )
        reports = await trainers.send(version, [endpoint for own in found for endpoint in own])
        buckets = sum(report.buckets for report in reports)
        if not buckets:
            raise EngineError(f"the trainer exported no weights for version {version}.")
        await engines.each("weights_sent", version)
        return PublishReport(
            version=version,
            seconds=time.perf_counter() - started,
            bytes_sent=sum(report.bytes_sent for report in reports),
            buckets=buckets,
            compared_with=next((report.compared_with for report in reports if report.compared_with is not None), None),
            density=next((report.density for report in reports if report.density is not None), None),
        )
