"""ServedEngines: those of a model that is served and not trained, as who asks them sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from slime_core.contracts.engine import EngineInfo
from slime_core.contracts.reward import ServedModel
from slime_core.rollout.client import EngineClient


class ServedEngines:
    """A row of the engines table. The client says which are in service, and puts one into a lost one's place."""

    def __init__(
        self, client: EngineClient, infos: Sequence[EngineInfo], model_path: Path, *, first_index: int
    ) -> None:
        """`first_index`: of the first one, among all engines of the run."""
        self.client = client
        self.first_index = first_index
        self._infos = dict(enumerate(infos))
        self._model_path = str(model_path)
        self._examination = asyncio.Lock()

    def replaced(self, index: int, info: EngineInfo) -> None:
        """Another engine is to take the place of the run's engine `index`."""
        self._infos[index - self.first_index] = info

    async def servers(self) -> tuple[ServedModel, ...]:
        """Those in service, once there is one. EngineError if there will be none any more."""
        await self.client.serving()
        infos = [self._infos[index] for index in self.client.indices]
        return tuple(
            ServedModel(url=info.address, token=info.token, model_path=self._model_path)
            for info in infos
            if info.address is not None
        )

    async def changed(self, asked: Sequence[ServedModel]) -> bool:
        """Whether others serve than those that were `asked` in vain. Who does not say that it is well is taken out of service;
        where nobody watches the engines, its EngineError is raised."""
        async with self._examination:
            if await self.servers() == asked:
                await self.client.each("health")
        return await self.servers() != asked
