"""RouterApp: the ASGI app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from slime_core.config.part import BoundPlugin
from slime_core.errors import ConfigError
from slime_router.server.engines import Engines
from slime_router.server.generate import Generate
from slime_router.server.json_response import json_error, json_response
from slime_router.server.metrics import Metrics, MiddlewareCollector, UpstreamCollector
from slime_router.server.programs import Abort
from slime_router.server.settings import Settings
from slime_router.server.upstreams import Upstream, Upstreams
from slime_serving.bearer_auth import BearerAuth


@runtime_checkable
class HasRoutes(Protocol):
    """A middleware that adds paths to the router."""

    def routes(self) -> Sequence[BaseRoute]: ...


class NewWorker(msgspec.Struct):
    """Body of POST /workers. Further fields of sglang-router's are ignored."""

    url: str
    worker_type: str = "regular"


class RouterApp:
    """Routes requests to the upstreams through middlewares, and serves workers, health and metrics."""

    def __init__(self, upstreams: Upstreams, parts: Sequence[BoundPlugin], settings: Settings) -> None:
        """`parts`: the middlewares, outermost first."""
        self._upstreams = upstreams
        self._token = settings.token
        self._engines = Engines(upstreams, settings)
        self._metrics = Metrics()
        self._middlewares = [part.build() for part in parts]
        by_name: dict[str, list[object]] = {}
        for part, middleware in zip(parts, self._middlewares, strict=True):
            by_name.setdefault(part.name, []).append(middleware)
        self._metrics.registry.register(UpstreamCollector(upstreams))
        self._metrics.registry.register(MiddlewareCollector(by_name))  # type: ignore[arg-type]
        self._generate = Generate(self._engines, upstreams, self._middlewares, settings, self._metrics)

    def asgi(self) -> ASGIApp:
        routes: list[BaseRoute] = [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/abort_request", self._abort, methods=["POST"]),
            Route("/workers", self._workers, methods=["GET", "POST"]),
            Route("/workers/{id}", self._worker, methods=["GET", "DELETE"]),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
        ]
        for middleware in self._middlewares:
            if isinstance(middleware, HasRoutes):
                routes += middleware.routes()
        return BearerAuth(Starlette(routes=routes, lifespan=self._lifespan), self._token, refusal=refusal)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._engines.open()
        yield
        await self._engines.close()

    async def _health(self, request: Request) -> Response:
        up = sum(upstream.up for upstream in self._upstreams)
        return json_response({"status": "ok" if up else "no upstream is up", "up": up}, 200 if up else 503)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _workers(self, request: Request) -> Response:
        if request.method == "GET":
            listed = [shown(upstream) for upstream in self._upstreams]
            return json_response({"workers": listed, "total": len(listed), "stats": {"regular_count": len(listed)}})
        try:
            upstream = self._upstreams.add(msgspec.json.decode(await request.body(), type=NewWorker).url)
        except msgspec.MsgspecError as error:
            return json_error(422, f'{error}. Send {{"url": "http://HOST:PORT"}}')
        except ConfigError as error:
            return json_error(422, str(error))
        location = f"/workers/{upstream.id}"
        accepted = {"status": "accepted", "worker_id": upstream.id, "url": upstream.url, "location": location}
        return json_response(accepted, 202, {"location": location})

    async def _worker(self, request: Request) -> Response:
        upstream = self._upstreams.find(request.path_params["id"])
        if upstream is None:
            return json_error(404, f"no worker {request.path_params['id']}. GET /workers lists them")
        if request.method == "GET":
            return json_response(shown(upstream))
        self._upstreams.remove(upstream)
        return json_response({"status": "accepted", "worker_id": upstream.id}, 202)

    async def _abort(self, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=Abort)
        except msgspec.MsgspecError as error:
            return json_error(422, f'{error}. Send {{"rid": "NAME"}} or {{"abort_all": true}}')
        self._generate.abort(asked.rid or "", everything=asked.abort_all)
        self._engines.abort_everywhere(asked)
        return json_response({"status": "accepted"})


def refusal(reason: str) -> Response:
    return json_error(401, reason, {"www-authenticate": "Bearer"})


def shown(upstream: Upstream) -> dict[str, object]:
    """A worker in sglang-router's form."""
    return {
        "id": upstream.id,
        "url": upstream.url,
        "worker_type": "regular",
        "is_healthy": upstream.up,
        "load": upstream.in_flight,
        "connection_mode": "HTTP",
    }
