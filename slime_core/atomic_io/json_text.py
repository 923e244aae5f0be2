"""JSON text of user values in prompts and samples."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from slime_core.errors import DataError


def json_text(value: Any, where: str) -> str:
    """Returns `value` as JSON; tuples become lists, keys strings. Raises DataError, with `where` and the path of keys, for
    other values that JSON cannot represent, NaN and infinity included."""
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
        # A lone surrogate is legal in JSON only as an escape.
        return json.dumps(value, allow_nan=False)
    return text


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _find_culprit(value: Any) -> tuple[str, Any]:
    path = ""
    # Bounded, since a value that contains itself has no innermost part.
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
