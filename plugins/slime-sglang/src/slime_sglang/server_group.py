"""ServerGroup: starts, watches and calls the servers of one engine, with sglang-router in front if configured."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import aiohttp

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_serving.connection import allow_connections, new_pool
from slime_serving.running import version_of
from slime_serving.server_process import ServerProcess
from slime_sglang.config import SglangOptions
from slime_sglang.connection import SglangConnection
from slime_sglang.external import connect_external
from slime_sglang.launching import start_server
from slime_sglang.router import Router, WorkerRole, start_router

WATCH_S: Final = 0.25
"""Interval of the checks whether processes live."""
FLUSH_TRIES: Final = 60
"""Attempts to flush, one per second: SGLang refuses while requests run."""


class ServerGroup:
    """Call `start` once, and `stop` at the end."""

    def __init__(self, config: SglangOptions) -> None:
        self._config = config
        self.name = "engine sglang"
        self.servers: list[SglangConnection] = []
        self.router: Router | None = None
        self._roles: list[WorkerRole] = []
        self._processes: list[ServerProcess] = []
        self._pool: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None
        # sglang-router forwards the caller's own token to paired servers.
        self._common_token = secrets.token_urlsafe(24) if config.prefill_servers else None

    async def start(self, setup: EngineSetup) -> None:
        """Starts or connects to the servers. Raises EngineError if one dies or hangs; call `stop` then."""
        self.name = f"engine {setup.index}"
        allow_connections(setup.max_batch, self.name)
        pool = self._pool = new_pool()
        if self._config.external_engine_addrs:
            if setup.num_nodes > 1:
                raise EngineError(
                    f"{self.name}: launcher.rollout_num_gpus_per_engine: the run does not know the devices of external "
                    "servers. Omit it."
                )
            self.servers = connect_external(self._config, setup, pool)
            self._roles = [WorkerRole()] * len(self.servers)
            return
        starting = [
            asyncio.create_task(start_server(self._config, setup, place, pool, common_token=self._common_token))
            for place in range(self._config.servers)
        ]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if not isinstance(outcome, BaseException):
                    self.servers.append(outcome.connection)
                    self._roles.append(self._role_of(len(self._roles), outcome.bootstrap_port))
                    self._processes.append(outcome.process)

    def _role_of(self, place: int, bootstrap_port: int | None) -> WorkerRole:
        if not self._config.prefill_servers:
            return WorkerRole()
        return WorkerRole("prefill" if place < self._config.prefill_servers else "decode", bootstrap_port)

    async def start_router(self, setup: EngineSetup) -> None:
        """Starts sglang-router in front of all servers, if router_policy is set."""
        if self._config.router_policy == "none":
            return
        assert self._pool is not None
        self.router = await start_router(
            self._config, setup, self._pool, self.servers, self._roles, common_token=self._common_token
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

    @property
    def pid(self) -> int | None:
        """Pid of the first server; None for external servers."""
        return self._processes[0].pid if self._processes else None

    def watch(self, on_death: Callable[[EngineError], None]) -> None:
        """Calls `on_death` when the first process has died."""
        self._watch = asyncio.create_task(self._look(on_death), name=f"{self.name}, watch")

    async def _look(self, on_death: Callable[[EngineError], None]) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for process in self._processes:
                if process.exit_code is not None:
                    on_death(
                        EngineError(
                            f"{self.name}: its process {process.pid} {process.why}. Last lines of {process.log}:\n"
                            f"{process.last_lines()}"
                        )
                    )
                    return

    async def stop(self) -> None:
        """Stops all processes. A second call, or one before `start`, does nothing. Raises EngineError if processes are left."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait([watch])
        processes, self._processes = self._processes, []
        pool, self._pool = self._pool, None
        try:
            ends = await asyncio.gather(*(process.stop() for process in processes), return_exceptions=True)
        finally:
            # Also if the caller is cancelled.
            if pool is not None:
                await pool.close()
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    # ---------------------------------------------------------------- calls to all servers

    async def ask_health(self, path: str) -> None:
        """GETs `path` from all servers, and asks the router, which may hang while they serve. If a process has just died, its
        error from `watch` should come first, so an error of a connection is raised a moment later."""
        asked = [(server, path) for server in self.servers]
        if self.router is not None:
            asked.append((self.router.connection, "/health"))
        try:
            await asyncio.gather(*(each.get(where, timeout_s=self._config.health_timeout) for each, where in asked))
        except EngineError:
            await asyncio.sleep(2 * WATCH_S)
            raise

    async def post(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """Sends the same call to all servers, and returns the responses by server. Raises EngineError also if SGLang reports
        that it did not succeed."""
        return list(await asyncio.gather(*(self.post_to(server, path, body) for server in self.servers)))

    async def post_to(self, server: SglangConnection, path: str, body: Mapping[str, Any]) -> Any:
        """`post` for one server."""
        response = await server.post(path, body, timeout_s=self._config.control_timeout)
        if isinstance(response, Mapping) and response.get("success") is False:
            raise EngineError(f"{server.name}: {path}: {response.get('message')}")
        return response

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

    async def versions(self) -> Sequence[int]:
        """Weight versions by server. Raises EngineError for a version that this run did not send."""
        responses = await asyncio.gather(
            *(server.get("/model_info", timeout_s=self._config.control_timeout) for server in self.servers)
        )
        held = []
        for server, response in zip(self.servers, responses, strict=True):
            try:
                held.append(version_of(response["weight_version"]))
            except (KeyError, TypeError, ValueError) as error:
                raise EngineError(f"{server.name}: /model_info has no version that slime sent: {response}") from error
        return held
