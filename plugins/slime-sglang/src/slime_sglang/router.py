"""Router: sglang-router in front of an engine's servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_serving.held_port import held_port, number_of
from slime_serving.server_process import ServerProcess, address_of
from slime_sglang.config import SglangOptions
from slime_sglang.connection import SglangConnection
from slime_sglang.log_format import SGLANG_LOG

MODULE: Final = "slime_sglang.server.launch_router"
READY_S: Final = 120.0
POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """The role of a server behind a router."""

    kind: Literal["regular", "prefill", "decode"] = "regular"
    bootstrap_port: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"worker_type": self.kind}
        return body if self.bootstrap_port is None else body | {"bootstrap_port": self.bootstrap_port}


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    connection: SglangConnection
    process: ServerProcess

    async def workers(self) -> dict[str, str]:
        """Ids of the servers behind it, by address."""
        response = await self.connection.get("/workers", timeout_s=30.0)
        try:
            return {str(worker["url"]): str(worker["id"]) for worker in response["workers"]}
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.connection.name}: GET /workers returned {str(response)[:300]}") from error

    async def add(self, server: SglangConnection, role: WorkerRole | None = None) -> None:
        """Adds a server; returns when it gets requests."""
        body = {"url": server.address, "api_key": server.token, **(role or WorkerRole()).body}
        await self.connection.post("/workers", body, timeout_s=30.0)
        await self._until_listed(server.address, listed=True)

    async def remove(self, server: SglangConnection) -> None:
        """Removes a server; returns when it gets no more requests."""
        workers = await self.workers()
        if server.address not in workers:
            raise EngineError(
                f"{self.connection.name}: {server.address} is not behind it: {', '.join(workers) or 'nothing is'}."
            )
        await self.connection.ask("DELETE", f"/workers/{workers[server.address]}", None, timeout_s=30.0)
        await self._until_listed(server.address, listed=False)

    async def _until_listed(self, address: str, *, listed: bool) -> None:
        deadline = time.monotonic() + READY_S
        while (address in await self.workers()) is not listed:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.connection.name}: {address} has not been {'added' if listed else 'removed'} in {READY_S:g} s. Last "
                    f"lines of {self.process.log}:\n{self.process.last_lines()}"
                )
            await asyncio.sleep(POLL_S)


def chosen_options(config: SglangOptions) -> dict[str, Any]:
    """Defaults for rollouts, and the run's `router_options`, which override them."""
    return {
        "request_timeout_secs": int(config.request_timeout),
        # Retries would also repeat requests that must not be repeated; the kernel repeats the others.
        "disable_retries": True,
        # With sglang-router's defaults, 64 and 1.5, cache_aware gives a server up to 64 requests more than another.
        "balance_abs_threshold": 10,
        "balance_rel_threshold": 1.2,
        **config.router_options,
    }


async def start_router(
    config: SglangOptions,
    setup: EngineSetup,
    pool: aiohttp.ClientSession,
    servers: Sequence[SglangConnection],
    roles: Sequence[WorkerRole],
    *,
    common_token: str | None = None,
) -> Router:
    """Starts a router and adds all `servers`. Raises EngineError with the log's last lines if it dies or does not get
    ready."""
    held, held_for_metrics = held_port(setup.host), held_port()
    port, token = number_of(held), common_token or secrets.token_urlsafe(24)
    options: dict[str, Any] = {
        **chosen_options(config),
        "worker_urls": [],
        "pd_disaggregation": bool(config.prefill_servers),
        "policy": config.router_policy,
        "host": setup.host,
        "port": port,
        "prometheus_port": number_of(held_for_metrics),
        "prometheus_host": "127.0.0.1",
        "api_key": token,
    }
    log = setup.run_dir / "logs" / f"sglang-router-{setup.index}.log"
    process = ServerProcess(MODULE, options, log=log, form=SGLANG_LOG, environment=os.environ)
    router = Router(
        connection=SglangConnection(pool, address_of(setup.host, port), token, f"engine {setup.index}, router"),
        process=process,
    )
    try:
        with held, held_for_metrics:
            await until_up(router)
        for server, role in zip(servers, roles, strict=True):
            await router.add(server, role)
    except BaseException:
        # The error that stopped the start is raised, not one of `stop`.
        with contextlib.suppress(EngineError):
            await process.stop()
        raise
    return router


async def until_up(router: Router) -> None:
    """Waits until the router responds. Requests /workers, because it reports healthy too early."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            await router.workers()
            return
        except EngineError:
            if router.process.exit_code is not None or time.monotonic() > deadline:
                raise EngineError(
                    f"{router.connection.name}: it {router.process.ending}, but has not responded. Last lines of "
                    f"{router.process.log}:\n{router.process.last_lines()}"
                ) from None
        await asyncio.sleep(POLL_S)
