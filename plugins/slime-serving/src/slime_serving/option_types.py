"""Types of a server's options, from annotations in its source."""

from __future__ import annotations

from typing import Any


def type_of(text: str) -> Any:
    """The type for parsing the command line; the server checks the rest."""
    text = text.strip("'\"")
    for wrapper in ("Optional[", "typing.Optional["):
        if text.startswith(wrapper):
            text = text[len(wrapper) : -1]
    text = text.removesuffix("| None").strip()
    plain: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}
    if text in plain:
        return plain[text]
    if text.startswith(("List[", "list[")):
        return list[plain.get(text[5:-1], Any)]  # type: ignore[misc]
    if text.startswith("Literal["):
        return str
    return Any
