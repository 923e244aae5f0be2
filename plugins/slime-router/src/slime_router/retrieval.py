"""POST /retrieve_from_text: the exact tokens of a conversation, to train on them."""

from __future__ import annotations

from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slime_router.segment import Exact
from slime_router.server.json_response import json_error, json_response
from slime_router.server.session_key import SESSION_KEY


class Retriever(Protocol):
    """Returns the exact tokens of conversations."""

    async def retrieve(self, text: str, session_id: str | None = None) -> Exact: ...


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """Body of the request; the session is in the same header as for /generate."""

    text: str


def retrieval(cache: Retriever) -> Route:
    async def retrieve_from_text(request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=Asked)
        except msgspec.MsgspecError as error:
            return json_error(400, f'{error}. Send {{"text": "..."}}')
        found = await cache.retrieve(asked.text, request.headers.get(SESSION_KEY))
        return json_response(
            {
                "tokens": found.token_ids.tolist(),
                "log_probs": found.log_probs.tolist(),
                "loss_mask": found.loss_mask.tolist(),
                "weight_versions": [span._asdict() for span in found.spans],
            }
        )

    return Route("/retrieve_from_text", retrieve_from_text, methods=["POST"])
