"""SglangAdapters: the adapters that SGLang's servers hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_serving.adapter_options import AdapterOptions
from slime_serving.adapters import ServedAdapters
from slime_sglang.adapted_layers import ADAPTED
from slime_sglang.connection import SglangConnection
from slime_sglang.server_group import SglangServers

LOAD: Final = "/load_lora_adapter"
UNLOAD: Final = "/unload_lora_adapter"
HEAD: Final = "lm_head"


class SglangAdapters(ServedAdapters):
    def __init__(self, fleet: SglangServers, config: AdapterOptions, folder: Path, setup: EngineSetup) -> None:
        super().__init__(config, folder, setup.model_path, engine=f"engine {setup.index}")
        self._fleet = fleet
        self._on_cpu = setup.device == "cpu"
        self._held: dict[str, list[SglangConnection]] = {}

    def problem_of_layers(self, layers: Sequence[str]) -> str | None:
        if other := next((layer for layer in layers if layer.rpartition(".")[2] not in ADAPTED), None):
            return (
                f"it adapts {other}, and SGLang applies adapters to layers with these names alone: "
                f"{', '.join(sorted(ADAPTED))}. Leave its part out (attention=False or mlp=False; in Tinker programs "
                "train_attn=False or train_mlp=False), or use engine vllm."
            )
        if self._on_cpu and (head := next((layer for layer in layers if layer.rpartition(".")[2] == HEAD), None)):
            return (
                f"it adapts the output layer ({head}), and on a CPU SGLang gives the rows of one request another one's adapter "
                "there. Leave it out (unembedding=False, in Tinker programs train_unembed=False), or use GPUs."
            )
        return None

    async def send(self, name: str, folder: Path) -> None:
        self._held[name] = []
        await self._fleet.on_each(lambda server: self._send_to(server, name, folder))

    async def _send_to(self, server: SglangConnection, name: str, folder: Path) -> None:
        response = await self._fleet.post_to(server, LOAD, {"lora_name": name, "lora_path": str(folder)})
        if not response["success"]:
            raise EngineError(f"{server.name}: {LOAD}: {response.get('error_message')}")
        self._held[name].append(server)

    async def forget(self, name: str) -> None:
        held = self._held.get(name, [])

        async def forget_on(server: SglangConnection) -> None:
            if server in held:
                await self._fleet.post_to(server, UNLOAD, {"lora_name": name})
                held.remove(server)

        await self._fleet.on_each(forget_on)
        self._held.pop(name, None)
