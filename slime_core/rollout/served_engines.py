"""ServedEngines: engines of a model that is served but not trained, for rewards and teachers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from slime_core.contracts.engine import EngineInfo
from slime_core.contracts.reward import ServedModel
from slime_core.rollout.client import EngineClient


class ServedEngines:
    """Engines of one row of the engines table. The client knows which are in service, and replaces lost ones."""

    def __init__(
        self, client: EngineClient, infos: Sequence[EngineInfo], model_path: Path, *, engine: str, first_index: int
    ) -> None:
        """`engine`: its name. `first_index`: index of the first one among all engines of the run."""
        self.client = client
        self.first_index = first_index
        self._infos = dict(enumerate(infos))
        self._model_path = str(model_path)
        self._engine = engine
        self._examination = asyncio.Lock()

    def replaced(self, index: int, info: EngineInfo) -> None:
        """Records that another engine replaces the run's engine `index`."""
        self._infos[index - self.first_index] = info

    async def servers(self) -> tuple[ServedModel, ...]:
        """Waits for an engine in service and returns all of them. Raises EngineError if there will be none."""
        await self.client.serving()
        infos = [self._infos[index] for index in self.client.indices]
        return tuple(
            ServedModel(url=info.address, token=info.token, model_path=self._model_path, engine=self._engine)
            for info in infos
            if info.address is not None
        )

    async def changed(self, asked: Sequence[ServedModel]) -> bool:
        """True if other servers are in service than `asked`, whose request failed. Checks them first: an unhealthy one is taken
        out of service or, without a watcher, its EngineError is raised."""
        async with self._examination:
            if await self.servers() == asked:
                await self.client.call_all("health")
        return await self.servers() != asked
