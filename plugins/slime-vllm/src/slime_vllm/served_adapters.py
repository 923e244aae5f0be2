"""VllmAdapters: the adapters that vLLM's servers hold."""

from __future__ import annotations

from pathlib import Path

from slime_core.contracts.setup import EngineSetup
from slime_serving.adapter_options import AdapterOptions
from slime_serving.adapters import ServedAdapters
from slime_vllm.adapter import LOAD, UNLOAD
from slime_vllm.connection import VllmConnection
from slime_vllm.server_group import VllmServers

WORKERS = "/collective_rpc"


class VllmAdapters(ServedAdapters):
    def __init__(self, fleet: VllmServers, config: AdapterOptions, folder: Path, setup: EngineSetup) -> None:
        super().__init__(config, folder, setup.model_path, engine=f"engine {setup.index}")
        self._fleet = fleet
        self._numbers: dict[str, dict[str, int | None]] = {}
        """vLLM's number of each adapter, by its name, of each server, by its address; None: not known."""

    async def send(self, name: str, folder: Path) -> None:
        self._numbers[name] = {}
        await self._fleet.on_each(lambda server: self._send_to(server, name, folder))

    async def _send_to(self, server: VllmConnection, name: str, folder: Path) -> None:
        await self._fleet.post_to(server, LOAD, {"lora_name": name, "lora_path": str(folder)})
        numbers = self._numbers[name]
        numbers[server.address] = None
        # vLLM ignores tensors that belong to no layer.
        response = await self._fleet.post_to(server, WORKERS, {"method": "newest_adapter"})
        numbers[server.address] = int(response["results"][0])

    async def forget(self, name: str) -> None:
        numbers = self._numbers.get(name, {})
        await self._fleet.on_each(lambda server: self._forget_on(server, name, numbers))
        self._numbers.pop(name, None)

    async def _forget_on(self, server: VllmConnection, name: str, numbers: dict[str, int | None]) -> None:
        if server.address not in numbers:
            return
        # The route forgets the name alone, and once; workers may be asked again.
        if (number := numbers[server.address]) is not None:
            await self._fleet.post_to(server, WORKERS, {"method": "remove_lora", "args": [number]})
        await self._fleet.post_to(server, UNLOAD, {"lora_name": name})
        del numbers[server.address]
