"""SglangServers: the servers of one engine, with sglang-router in front if configured."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final, cast

import aiohttp

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_serving.external import connect_external
from slime_serving.interpreter import Installed, linked_packages, program_in
from slime_serving.server_group import ServerGroup
from slime_sglang.config import SglangOptions, role_of
from slime_sglang.connection import SglangConnection
from slime_sglang.launching import PACKAGES, SglangStarted, begin_server, start_server
from slime_sglang.program import SGLANG
from slime_sglang.router import Router, WorkerRole, start_router
from slime_sglang.server.hook_table import RENDEZVOUS, in_source

FLUSH_TRIES: Final = 60
"""Attempts to flush, one per second: SGLang refuses while requests run."""


class SglangServers(ServerGroup[SglangConnection]):
    version_path: ClassVar[str] = "/model_info"

    def __init__(self, config: SglangOptions) -> None:
        super().__init__("sglang", control_timeout_s=config.control_timeout, health_timeout_s=config.health_timeout)
        self._config = config
        self.router: Router | None = None
        self._bootstrap_ports: dict[int, int | None] = {}
        # sglang-router forwards the caller's own token to paired servers.
        self._common_token = secrets.token_urlsafe(24) if config.prefill_servers else None
        self._packages: TemporaryDirectory[str] | None = None
        """Of slime, for an interpreter of its own."""

    @property
    def size(self) -> int:
        return self._config.servers

    def external(self, setup: EngineSetup, pool: aiohttp.ClientSession) -> Sequence[SglangConnection] | None:
        given = self._config
        if not given.external_engine_addrs:
            return None
        return connect_external(
            SglangConnection,
            given.external_engine_addrs,
            setup,
            pool,
            servers=given.servers,
            token_file=given.external_engine_token_file,
        )

    def _linked(self) -> str | None:
        if self._config.python is not None and self._packages is None:
            self._packages = linked_packages(*PACKAGES)
        return None if self._packages is None else self._packages.name

    def begin(self, setup: EngineSetup, place: int, pool: aiohttp.ClientSession) -> SglangStarted | None:
        installed = None if self._config.python is None else program_in(self._config.python, SGLANG)
        # Where it would wait. Without that it would use devices that trainers use.
        if not in_source(RENDEZVOUS, installed.folder if isinstance(installed, Installed) else None):
            return None
        return begin_server(
            self._config,
            setup,
            place,
            pool,
            common_token=self._common_token,
            packages=self._linked(),
            gate=self.new_gate(),
        )

    async def launch(self, setup: EngineSetup, place: int, pool: aiohttp.ClientSession) -> SglangStarted:
        started = await start_server(
            self._config,
            setup,
            place,
            pool,
            common_token=self._common_token,
            packages=self._linked(),
            begun=cast("SglangStarted | None", self._begun.pop(place, None)),
        )
        self._bootstrap_ports[place] = started.bootstrap_port
        return started

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            packages, self._packages = self._packages, None
            if packages is not None:
                packages.cleanup()

    def _role_of(self, place: int) -> WorkerRole:
        role = role_of(self._config, place)
        return WorkerRole() if role is None else WorkerRole(role, self._bootstrap_ports.get(place))

    async def start_router(self, setup: EngineSetup) -> None:
        """Starts sglang-router in front of all servers, if router_policy is set."""
        if self._config.router_policy == "none":
            return
        assert self._pool is not None
        roles = [self._role_of(place) for place in range(len(self.servers))]
        self.router = await start_router(
            self._config, setup, self._pool, self.servers, roles, common_token=self._common_token
        )
        self._processes.append(self.router.process)

    @property
    def entrance(self) -> SglangConnection:
        return self.servers[0] if self.router is None else self.router.connection

    def at(self, place: int) -> SglangConnection:
        """The connection for requests to this server: the server, or the router, which chooses a server by itself."""
        return self.servers[place] if self.router is None else self.entrance

    @property
    def routed(self) -> bool:
        return self.router is not None

    def headers(self, session: str | None) -> Mapping[str, str] | None:
        return None if session is None else {"X-SMG-Routing-Key": session}

    async def abort(self, ids: Sequence[str] | None) -> None:
        """Aborts these requests on all servers; None: all requests. SGLang forwards one abort per id."""
        calls: list[dict[str, Any]] = [{"abort_all": True}] if ids is None else [{"rid": rid} for rid in ids]
        await asyncio.gather(*(self.post("/abort_request", call) for call in calls))

    # ---------------------------------------------------------------- calls to all servers

    async def ask_health(self, path: str, *others: tuple[SglangConnection, str]) -> None:
        """Also asks the router, which may hang while the servers serve."""
        routers = [] if self.router is None else [(self.router.connection, "/health")]
        await super().ask_health(path, *routers, *others)

    async def flush(self) -> None:
        """Drops cached prefixes, as soon as nothing runs."""
        await asyncio.gather(*(self._flush(server) for server in self.servers))

    async def _flush(self, server: SglangConnection) -> None:
        for attempt in range(FLUSH_TRIES):
            try:
                await server.ask("POST", "/flush_cache", {}, timeout_s=self._config.control_timeout)
                return
            except EngineError as error:
                if "status 400" not in str(error) or attempt == FLUSH_TRIES - 1:
                    raise
            await asyncio.sleep(1.0)
