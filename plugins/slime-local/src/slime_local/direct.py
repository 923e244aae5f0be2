"""The transport `direct`: the exporter's buckets are the engines' arguments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from slime_core.contracts.transport import EngineGroup, TrainerLink, WeightTransport
from slime_core.errors import EngineError
from slime_core.registry.boundary import held
from slime_core.types.report import WeightUpdateReport
from slime_local.config import DirectConfig


class DirectTransport(WeightTransport):
    def __init__(self, config: DirectConfig) -> None:
        self._config = config

    async def push(self, trainers: TrainerLink, engines: EngineGroup, version: int) -> WeightUpdateReport:
        """Bucket i + 1 is exported while the engines load bucket i. Raises EngineError if an engine refuses a bucket,
        does not have `version` afterwards, or, where asked, holds other bits than the first engine."""
        started = time.perf_counter()
        bytes_sent = buckets = 0
        stream = trainers.stream_weights(version, self._config.update_weight_buffer_size)
        loading: asyncio.Task[Sequence[Any]] | None = None
        try:
            async for bucket in stream:
                if loading is not None:
                    await loading
                loading = asyncio.ensure_future(engines.call_all("load_bucket", bucket))
                # A turn of the event loop, so that engines elsewhere begin before the next export takes this thread.
                await asyncio.sleep(0)
                buckets += 1
                # Under Ray a bucket is a reference; its size stays in shared memory and is not counted.
                bytes_sent += getattr(getattr(bucket, "data", None), "nbytes", 0)
            if loading is not None:
                await loading
        except BaseException:
            # What went wrong first is reported.
            with held():
                await _wind_up(stream, loading)
            raise
        if not buckets:
            raise EngineError(f"transport direct: the trainer exported no weights for version {version}.")
        await self._verify(engines, version)
        return WeightUpdateReport(
            version=version,
            seconds=time.perf_counter() - started,
            bytes_sent=bytes_sent,
            buckets=buckets,
            compared_with="engines" if self._config.check_weight_update_equal else None,
        )

    async def _verify(self, engines: EngineGroup, version: int) -> None:
        versions = await engines.call_all("version")
        wrong = [f"engine {index} has {has}" for index, has in enumerate(versions) if has != version]
        if wrong:
            raise EngineError(f"transport direct: pushed version {version}, but {', '.join(wrong)}.")
        if self._config.check_weight_update_equal:
            sums = await engines.call_all("checksum")
            if len(set(sums)) > 1:
                listed = ", ".join(f"engine {index}: {checksum}" for index, checksum in enumerate(sums))
                raise EngineError(f"transport direct: weights of version {version} differ between engines ({listed}).")


async def _wind_up(stream: AsyncIterator[Any], loading: asyncio.Task[Sequence[Any]] | None) -> None:
    """After an error: cancels the load that still runs, and closes the exporter's stream."""
    if loading is not None and not loading.done():
        loading.cancel()
        await asyncio.wait([loading])
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
