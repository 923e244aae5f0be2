"""EngineWorker: one rollout engine on its device. Takes a list of requests and streams the responses back."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_core.config.part import PluginSpec
from slime_core.contracts.engine import EngineInfo, RolloutEngine
from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import Completion, GenerateRequest
from slime_core.workers.agreement import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkerSpec:
    """Everything that an engine's worker is started with; plain data."""

    agreement: Agreement
    engine: PluginSpec
    setup: EngineSetup


class EngineWorker:
    """See `slime_core.contracts.engine` for the calling order."""

    def __init__(self, spec: EngineWorkerSpec) -> None:
        self._spec = spec
        self._engine: RolloutEngine = spec.agreement.resolve(spec.engine, spec.agreement.registry()).build()

    async def prepare_start(self) -> None:
        await self._engine.prepare_start(self._spec.setup)

    async def start(self) -> EngineInfo:
        info = await self._engine.start(self._spec.setup)
        return info if info.pid is not None else replace(info, pid=os.getpid())

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Completion, None]:
        """Completions as they end."""
        return self._engine.stream(requests)

    async def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the engine contract by its name."""
        return await getattr(self._engine, method)(*args)
