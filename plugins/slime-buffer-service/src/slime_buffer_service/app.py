"""The ASGI app: POST /get_samples, /add_samples and /generate, GET /health."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from slime_buffer_service.judgement import Refused, sample_of
from slime_buffer_service.messages import AddSamples, Generate, GetSamples, Message, Trajectory
from slime_buffer_service.prompt_queue import Full, Lease, PromptQueue
from slime_serving.bearer_auth import BearerAuth

RETRY_AFTER_S: Final = 1
M = TypeVar("M", bound=Message)


class TooLarge(Exception):
    """The body has more bytes than the limit."""


class BufferApp:
    """Gives leases of the prompt queue to agents, and sets their responses. The generator waits for these."""

    def __init__(self, queue: PromptQueue, *, max_body_bytes: int, give_labels: bool) -> None:
        self._queue = queue
        self._max_body_bytes = max_body_bytes
        self._give_labels = give_labels

    def asgi(self, token: str) -> ASGIApp:
        routes = [
            Route("/get_samples", self._with_errors(self._get_samples), methods=["POST"]),
            Route("/add_samples", self._with_errors(self._add_samples), methods=["POST"]),
            Route("/generate", self._with_errors(self._generate), methods=["POST"]),
            Route("/health", self._health),
        ]
        return BearerAuth(Starlette(routes=routes), token, refusal=lambda reason: JSONResponse({"error": reason}, 401))

    def _with_errors(
        self, handle: Callable[[bytes], Awaitable[JSONResponse]]
    ) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def respond(request: Request) -> JSONResponse:
            try:
                return await handle(await self._body(request))
            except TooLarge:
                return JSONResponse({"error": f"the body has more than {self._max_body_bytes} bytes"}, 413)
            except ValidationError as error:
                return JSONResponse({"error": first_problem(error), "code": "invalid"}, 422)
            except Refused as refused:
                return JSONResponse({"error": refused.text, "code": refused.code}, refused.status)
            except Full:
                reason = f"agents hold {self._queue.num_leased} prompts already. Send trajectories for those first"
                return JSONResponse({"error": reason, "code": "full"}, 429, headers={"retry-after": str(RETRY_AFTER_S)})

        return respond

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                raise TooLarge
        return bytes(body)

    async def _get_samples(self, body: bytes) -> JSONResponse:
        asked = GetSamples.model_validate_json(body or b"{}")
        tickets = await self._queue.take(asked.num_samples, asked.wait_s)
        return JSONResponse({"samples": [self._shown(ticket) for ticket in tickets]})

    def _shown(self, ticket: Lease) -> dict[str, Any]:
        episode, prompt = ticket.episode, ticket.episode.prompt
        kept = ticket.kept
        shown = {
            "ticket": ticket.name,
            "evaluation": episode.evaluation,
            "version": ticket.versions[ticket.name],
            "prompt": prompt.text,
            "prompt_token_ids": prompt.token_ids.tolist(),
            "messages": None if prompt.messages is None else [dict(message) for message in prompt.messages],
            "tools": None if prompt.tools is None else [dict(tool) for tool in prompt.tools],
            "metadata": dict(prompt.metadata),
            "kept_token_ids": [] if kept is None else kept.response_tokens.tolist(),
            "max_new_tokens": ticket.room,
            "temperature": episode.sampling.temperature,
            "top_p": episode.sampling.top_p,
            "top_k": episode.sampling.top_k,
        }
        return shown | ({"label": prompt.label} if self._give_labels else {})

    async def _add_samples(self, body: bytes) -> JSONResponse:
        results, worst = [], 200
        for raw in AddSamples.model_validate_json(body).samples:
            name = raw.get("ticket") if isinstance(raw.get("ticket"), str) else None
            try:
                self._add(raw)
                results.append({"ticket": name, "accepted": True})
            except ValidationError as error:
                results.append({"ticket": name, "accepted": False, "code": "invalid", "error": first_problem(error)})
                worst = max(worst, 422)
            except Refused as refused:
                results.append({"ticket": name, "accepted": False, "code": refused.code, "error": refused.text})
                worst = max(worst, refused.status)
        return JSONResponse({"results": results}, worst)

    def _add(self, raw: dict[str, Any]) -> None:
        # Validated as JSON again: only there does the strict mode accept lists as tuples.
        try:
            text = json.dumps(raw, allow_nan=False)
        except ValueError:
            raise Refused("invalid", 422, "NaN and infinity are not JSON. Send null, or omit the number") from None
        pushed = Trajectory.model_validate_json(text)
        ticket = self._ticket(pushed.ticket)
        ticket.response.set_result(sample_of(pushed, ticket))
        self._queue.end(ticket, "it already has a response")

    def _ticket(self, name: str) -> Lease:
        ticket = self._queue.find(name)
        if ticket is not None:
            return ticket
        reason = self._queue.why_ended(name)
        if reason is None:
            raise Refused("unknown_ticket", 404, f'there is no ticket "{name[:64]}". POST /get_samples returns tickets')
        raise Refused("ticket_ended", 409, f'ticket "{name}": {reason}')

    async def _generate(self, body: bytes) -> JSONResponse:
        asked = Generate.model_validate_json(body)
        ticket = self._ticket(asked.ticket)
        episode = ticket.episode
        prompt = episode.prompt.token_ids
        if asked.token_ids[: len(prompt)] != prompt.tolist():
            raise Refused("invalid", 422, "token_ids do not begin with the ticket's prompt_token_ids")
        vocabulary = len(episode.tokenizer)
        if (highest := max(asked.token_ids)) >= vocabulary:
            raise Refused("invalid", 422, f"token_ids: {highest} is not among the tokenizer's {vocabulary} tokens")
        begun = len(asked.token_ids) - len(prompt) - (0 if ticket.kept is None else ticket.kept.response_length)
        if (room := ticket.room - begun) <= 0:
            raise Refused("too_long", 422, f"{begun} tokens, and the ticket has room for {ticket.room}")
        sampling = replace(
            episode.sampling,
            max_new_tokens=min(room, asked.max_new_tokens or room),
            stop=(*episode.sampling.stop, *asked.stop),
        )
        completion = await episode.complete(np.array(asked.token_ids, np.int32), sampling)
        return JSONResponse(
            {
                "token_ids": completion.token_ids.tolist(),
                "log_probs": [float(value) for value in completion.log_probs],
                "spans": [list(span) for span in completion.spans],
                "finish_reason": completion.finish_reason.value,
            }
        )

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "waiting": self._queue.num_waiting, "leased": self._queue.num_leased})


def first_problem(error: ValidationError) -> str:
    """The first problem of `error`, after the path of its field."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])
