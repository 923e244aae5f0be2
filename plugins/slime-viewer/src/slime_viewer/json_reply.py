"""Replies as JSON."""

from __future__ import annotations

from typing import Any, Final

import orjson

OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def json_bytes(reply: Any) -> bytes:
    """NaN and infinities become null; a number of more than 64 bits, which JavaScript cannot hold, a text."""
    return orjson.dumps(reply, default=str, option=OPTIONS)
