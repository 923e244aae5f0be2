"""JSON responses, with errors in the form that the SDK shows."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def json_response(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


def refused(status: int, reason: str) -> Response:
    return json_response({"detail": reason}, status)
