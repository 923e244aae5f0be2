"""JSON responses, with errors in SGLang's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers=headers, media_type="application/json")


def error_body(status: int, message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "code": status}})


def json_error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error_body(status, message), status, headers=headers, media_type="application/json")
