"""AgentServer: the HTTP server that agents call, on the loopback. Each episode has its own key."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from slime_agents.served import anthropic_api, openai_api, responses_api
from slime_agents.served.dialogue import BadCall
from slime_agents.served.session import Ended, Session
from slime_serving.in_loop import InLoopServer
from slime_serving.listener import listen

BACKLOG: Final = 1024
LARGEST_BODY: Final = 64 * 2**20
"""Bytes."""
INVALID: Final = "invalid_request_error"
SERVED: Final = (
    "POST /v1/chat/completions", "POST /v1/responses", "POST /v1/messages", "POST /v1/messages/count_tokens",
    "GET /v1/models",
)  # fmt: skip
EVENTS: Final = "text/event-stream"
# Clients must not retry: every retry would fail.
FINAL: Final = {"x-should-retry": "false"}


class AgentServer:
    """Started by the first episode, closed by `close`."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._threads: dict[str, str] = {}
        """Thread name -> key."""
        self._starting = asyncio.Lock()
        self._server: InLoopServer | None = None
        self._port = 0
        self._app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/responses", self._responses, methods=["POST"]),
                Route("/v1/messages", self._messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
                Route("/v1/models", self._models),
            ],
            exception_handlers={404: not_served, 405: not_served},
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def open(self, session: Session) -> str:
        """Registers a session, and returns its key."""
        async with self._starting:
            if self._server is None:
                await self._start()
        key = secrets.token_urlsafe(24)
        self._sessions[key] = session
        return key

    def name_thread(self, key: str, thread: str) -> None:
        """Assigns calls with this name in X-Session-ID to the session, whatever their key: for clients that many episodes
        share. Each thread is a separate conversation."""
        # Ignored after the episode has ended, while its agent may still run.
        if key in self._sessions:
            self._threads[thread] = key

    def drop(self, key: str) -> None:
        del self._sessions[key]
        self._threads = {thread: of for thread, of in self._threads.items() if of != key}

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def _start(self) -> None:
        listener = listen("127.0.0.1", 0, backlog=BACKLOG)
        self._port = listener.getsockname()[1]
        self._server = InLoopServer(self._app)
        await self._server.start(listener)

    def _session(self, request: Request) -> tuple[Session | None, str]:
        """The session of a request (None if its key is unknown), and its thread."""
        thread = request.headers.get("x-session-id", "")
        if thread in self._threads:
            return self._sessions[self._threads[thread]], thread
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (token if scheme.lower() == "bearer" else "")
        return self._sessions.get(key), ""

    async def _models(self, request: Request) -> Response:
        if self._session(request)[0] is None:
            return JSONResponse(openai_api.error("no such key", "authentication_error"), 401)
        model = {"id": openai_api.MODEL, "object": "model", "created": 0, "owned_by": "slime"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        async def respond(session: Session, thread: str, body: bytes) -> Response:
            asked = openai_api.ChatRequest.model_validate_json(body)
            call = replace(asked.call(session.sampling, session.ignored_parameters), thread=thread)
            replies = await session.respond_all(call, asked.n or 1)
            created = int(time.time())
            if asked.stream:
                events = openai_api.events(replies, asked, session.text_of, created)
                return StreamingResponse(iter(list(events)), media_type=EVENTS)
            return JSONResponse(openai_api.chat_completion(replies, asked, session.text_of, created))

        return await self._serve(request, respond, openai_api.error)

    async def _responses(self, request: Request) -> Response:
        async def respond(session: Session, thread: str, body: bytes) -> Response:
            asked = responses_api.ResponsesRequest.model_validate_json(body)
            stored = session.stored.setdefault(thread, {})
            items = asked.items(stored)
            call = asked.call(items, session.sampling, session.ignored_parameters)
            reply = await session.respond(replace(call, thread=thread))
            whole = responses_api.response(reply, asked, session.sampling, session.text_of, int(time.time()))
            if asked.store is not False:
                stored[whole["id"]] = [*items, *whole["output"]]
            if asked.stream:
                return StreamingResponse(iter(list(responses_api.events(whole))), media_type=EVENTS)
            return JSONResponse(whole)

        return await self._serve(request, respond, openai_api.error)

    async def _messages(self, request: Request) -> Response:
        async def respond(session: Session, thread: str, body: bytes) -> Response:
            asked = anthropic_api.MessagesRequest.model_validate_json(body)
            call = asked.call(session.sampling, session.ignored_parameters)
            reply = await session.respond(replace(call, thread=thread))
            if asked.stream:
                return StreamingResponse(iter(list(anthropic_api.events(reply))), media_type=EVENTS)
            return JSONResponse(anthropic_api.message(reply))

        return await self._serve(request, respond, anthropic_api.error)

    async def _count_tokens(self, request: Request) -> Response:
        async def respond(session: Session, thread: str, body: bytes) -> Response:
            asked = anthropic_api.MessagesRequest.model_validate_json(body)
            call = asked.call(session.sampling, session.ignored_parameters)
            return JSONResponse({"input_tokens": session.num_tokens(replace(call, thread=thread))})

        return await self._serve(request, respond, anthropic_api.error)

    async def _serve(self, request: Request, respond: Any, error: Callable[..., dict[str, Any]]) -> Response:
        session, thread = self._session(request)
        if session is None:
            return JSONResponse(error("no such key, or its episode has ended", "authentication_error"), 401)
        body = await body_of(request)
        if body is None:
            text = f"the request has more than {LARGEST_BODY // 2**20} MiB: shorten its messages"
            return JSONResponse(error(text, "request_too_large"), 413, headers=FINAL)
        try:
            done: Response = await respond(session, thread, body)
        except ValidationError as problem:
            first = problem.errors()[0]["loc"]
            text = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}".removeprefix(": ") for e in problem.errors())
            return JSONResponse(error(text, INVALID, str(first[0]) if first else None), 400)
        except BadCall as problem:
            return JSONResponse(error(str(problem), INVALID, problem.parameter), 400)
        except Ended as end:
            return JSONResponse(error(str(end), "episode_ended"), 409, headers=FINAL)
        return done


async def not_served(request: Request, problem: Exception) -> Response:
    text = (
        f"{request.method} {request.url.path} is not served here. There are {', '.join(SERVED)}: OpenAI's chat completions and "
        "responses, and Anthropic's messages."
    )
    return JSONResponse(
        openai_api.error(text, INVALID), problem.status_code if isinstance(problem, HTTPException) else 404
    )


async def body_of(request: Request) -> bytes | None:
    """None if it is larger than LARGEST_BODY."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST_BODY:
            return None
        parts.append(part)
    return b"".join(parts)
