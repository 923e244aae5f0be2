"""The transport `frozen`: the engines keep the weights of their folder, which are the trainer's, and get the number alone."""

from __future__ import annotations

import time

from slime_core.contracts.transport import EngineGroup, TrainerLink, WeightTransport
from slime_core.errors import ConfigError
from slime_core.types.report import WeightUpdateReport


class FrozenTransport(WeightTransport):
    async def push(self, trainers: TrainerLink, engines: EngineGroup, version: int) -> WeightUpdateReport:
        """Raises ConfigError if the trainer has made another version of the weights than its folder has."""
        if version > 0:
            raise ConfigError(
                f'sync.transport = "frozen": it sends no weights, and the trainer has changed its own (version {version}). Set '
                "backend.max_adapters, which freezes them, or leave out sync.transport and engine.max_adapters."
            )
        began = time.perf_counter()
        await engines.call_all("keep_weights", version)
        return WeightUpdateReport(version=version, seconds=time.perf_counter() - began, bytes_sent=0, buckets=0)
