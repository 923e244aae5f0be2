"""VllmServers: the servers of one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import aiohttp

from slime_core.contracts.setup import EngineSetup
from slime_serving.external import connect_external
from slime_serving.server_group import ServerGroup, Started
from slime_vllm.config import VllmOptions
from slime_vllm.connection import VllmConnection
from slime_vllm.generation import PREFIX
from slime_vllm.launching import begin_server, start_server


class VllmServers(ServerGroup[VllmConnection]):
    version_path: ClassVar[str] = "/weight_info"
    routed = False

    def __init__(self, config: VllmOptions) -> None:
        super().__init__("vllm", control_timeout_s=config.control_timeout, health_timeout_s=config.health_timeout)
        self._config = config

    @property
    def size(self) -> int:
        return self._config.servers

    def external(self, setup: EngineSetup, pool: aiohttp.ClientSession) -> Sequence[VllmConnection] | None:
        given = self._config
        if not given.external_engine_addrs:
            return None
        return connect_external(
            VllmConnection,
            given.external_engine_addrs,
            setup,
            pool,
            servers=given.servers,
            token_file=given.external_engine_token_file,
        )

    def begin(self, setup: EngineSetup, place: int, pool: aiohttp.ClientSession) -> Started[VllmConnection]:
        return begin_server(self._config, setup, place, pool, gate=self.new_gate())

    async def launch(self, setup: EngineSetup, place: int, pool: aiohttp.ClientSession) -> Started[VllmConnection]:
        return await start_server(self._config, setup, place, pool, begun=self._begun.pop(place, None))

    def at(self, place: int) -> VllmConnection:
        return self.servers[place]

    def headers(self, session: str | None) -> Mapping[str, str] | None:
        return None

    async def abort(self, ids: Sequence[str] | None) -> None:
        """Aborts these requests on all servers; None: all requests. Unknown ids have no effect."""
        if ids is None or ids:
            body = {} if ids is None else {"request_ids": [PREFIX + rid for rid in ids]}
            await self.post("/abort_requests", body)

    async def flush(self) -> None:
        """Drops cached prefixes. Requests that wait inside vLLM compute theirs again, unless they keep them by the pause mode,
        in which no prefixes are cached."""
        if self._config.pause_mode == "abort":
            await self.post("/reset_prefix_cache", {})
        elif self._config.pause_mode == "retract":
            await self.post("/reset_prefix_cache?reset_running_requests=true", {})
