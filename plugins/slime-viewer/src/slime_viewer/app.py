"""The app: addresses of the page, behind its token."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slime_core.errors import ConfigError, DataError, SlimeError
from slime_viewer.json_reply import json_bytes
from slime_viewer.not_there import NotThere
from slime_viewer.replies import OF_RUN, Page, Parameters

STATIC: Final = Path(str(files("slime_viewer"))) / "static"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing is loaded from elsewhere, and no script that stands in the text of a sample runs."""
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
HOSTS: Final = ["127.0.0.1", "localhost"]
"""A page of another host whose name was bent to this address sends that name."""
API: Final = "/api/"
SMALL: Final = 2_000
"""Bytes below which a reply is not compressed."""


def make_app(page: Page, token: str) -> Starlette:
    """`token`: what requests for anything of a run must have."""

    def of_page(reply: Callable[[Parameters], dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            return await replied(lambda: reply(Parameters(dict(request.query_params))))

        return respond

    async def of_run(request: Request) -> Response:
        def reply() -> dict[str, Any]:
            name = request.path_params["name"]
            if name not in OF_RUN:
                raise NotThere(f"{name!r} is not known; there are {', '.join(OF_RUN)}.")
            return OF_RUN[name](page.runs.find(request.path_params["run"]), Parameters(dict(request.query_params)))

        return await replied(reply)

    async def panel(request: Request) -> Response:
        return await replied(
            lambda: page.panel(page.runs.find(request.path_params["run"]), request.path_params["panel"])
        )

    async def module(request: Request) -> Response:
        found = page.panels.get(request.path_params["panel"])
        if found is None:
            return PlainTextResponse("no such panel", 404)
        return Response(found.panel.module, media_type="text/javascript")

    async def index(_: Request) -> Response:
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html")

    return Starlette(
        routes=[
            Route("/api/runs", of_page(page.list_runs)),
            Route("/api/changes", of_page(page.changes)),
            Route("/api/compare", of_page(page.compare)),
            Route("/api/config-difference", of_page(page.config_difference)),
            Route("/api/runs/{run}/panels/{panel}", panel),
            Route("/api/runs/{run}/{name}", of_run),
            Route("/panels/{panel}.js", module),
            Route("/", index),
            Mount("/", StaticFiles(directory=STATIC)),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
            Middleware(Guard, token=token),
            Middleware(GZipMiddleware, minimum_size=SMALL, compresslevel=1),
        ],
    )


async def replied(reply: Callable[[], dict[str, Any]]) -> Response:
    """The reply as JSON, made in a thread; an error as its sentence."""
    try:
        return await run_in_threadpool(lambda: as_json(reply()))
    except NotThere as error:
        return as_json({"error": str(error)}, 404)
    except DataError as error:
        return as_json({"error": str(error)}, 422)
    except SlimeError as error:
        return as_json({"error": str(error)}, 400 if isinstance(error, ConfigError) else 422)


def as_json(reply: dict[str, Any], status: int = 200) -> Response:
    return Response(json_bytes(reply), status, media_type="application/json")


class Guard:
    """Refuses requests for data without the token, and adds the headers to every reply."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        given = dict(scope["headers"]).get(b"authorization", b"")
        if scope["path"].startswith(API) and not secrets.compare_digest(given, self._token):
            refusal = as_json({"error": "This page needs the token of the address that `slime view` printed."}, 401)
            await refusal(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)
