"""The ASGI app: POST /retrieve, with the API of Search-R1's server, and /health."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from slime_search_r1.server.index import Hit, Index
from slime_serving.bearer_auth import BearerAuth

MAX_QUERIES: Final = 1024
MAX_QUERY_CHARS: Final = 100_000
MAX_BODY: Final = 64 * 2**20


class Asked(BaseModel):
    """Request of /retrieve."""

    model_config = ConfigDict(extra="forbid")

    queries: Annotated[list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]], Field(max_length=MAX_QUERIES)]
    topk: int = Field(3, ge=1, le=1000)
    return_scores: bool = False


def create_app(index: Index, token: str | None) -> ASGIApp:
    """`token`: bearer token that requests must carry; None: no token is required."""

    async def retrieve(request: Request) -> JSONResponse:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY:
                return JSONResponse({"error": f"more than {MAX_BODY} bytes"}, 413)
        try:
            asked = Asked.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)
        found = await run_in_threadpool(index.search, asked.queries, asked.topk)
        return JSONResponse({"result": [[shown(hit, asked.return_scores) for hit in hits] for hits in found]})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "documents": len(index)})

    routes = [Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)]
    return BearerAuth(Starlette(routes=routes), token, refusal=lambda text: JSONResponse({"error": text}, 401))


def shown(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = hit.document.model_dump()
    document["contents"] = document["contents"] or f'"{document["title"]}"\n{document["text"]}'
    return {"document": document, "score": hit.score} if with_score else document
