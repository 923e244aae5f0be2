"""JSON text of what users attach to prompts and samples."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from slime_core.errors import DataError


def json_text(value: Any, where: str) -> str:
    """`value` as JSON. Tuples become lists and keys strings; anything else that would not come back is a DataError
    that names `where` and the path of keys to it. NaN and infinity are not JSON."""
    try:
        text = _dump(value)
    except (TypeError, ValueError) as error:
        path, culprit = _find_culprit(value)
        found = culprit if isinstance(culprit, float) else f"of type {type(culprit).__name__}"
        raise DataError(
            f"{where}{path} is {found}, which JSON cannot hold; use strings, numbers, lists, objects or null"
        ) from error
    try:
        text.encode()
    except UnicodeEncodeError:
        # A lone surrogate: legal in JSON as an escape only.
        return json.dumps(value, allow_nan=False)
    return text


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _find_culprit(value: Any) -> tuple[str, Any]:
    path = ""
    # Bounded, because a value that contains itself has no innermost culprit.
    for _ in range(16):
        for step, child in _children(value):
            if not _is_json(child):
                path, value = path + step, child
                break
        else:
            break
    return path, value


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{place}]", child) for place, child in enumerate(value)]
    return []


def _is_json(value: Any) -> bool:
    try:
        _dump(value)
    except (TypeError, ValueError):
        return False
    return True
