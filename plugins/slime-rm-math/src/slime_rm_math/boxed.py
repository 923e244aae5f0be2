"""The last boxed answer of a text: `\\boxed{...}`, `\\boxed 5`, or `\\fbox{...}` where nothing is boxed."""

from __future__ import annotations

from collections.abc import Iterator


def last_boxed(text: str) -> str | None:
    """The content of the last box, stripped; None if there is none or the last one is never closed.

    A box that is cut off hides the earlier ones: the response did not get to its final answer.
    Braces nest; escaped braces (`\\{`) do not count, as in TeX. Time is linear in the length of the text.
    """
    for command in ("\\boxed", "\\fbox"):
        start = next(_ends_from_the_right(text, command), None)
        if start is not None:
            return _argument(text, start)
    return None


def _ends_from_the_right(text: str, command: str) -> Iterator[int]:
    """Positions after `command`, last first, where no letter follows (`\\boxedtext` is another command)."""
    at = text.rfind(command)
    while at >= 0:
        end = at + len(command)
        if not text[end : end + 1].isalpha():
            yield end
        at = text.rfind(command, 0, at)


def _argument(text: str, start: int) -> str | None:
    while start < len(text) and text[start].isspace():
        start += 1
    if start == len(text):
        return None
    if text[start] != "{":
        return _unbraced_argument(text, start)
    depth, at = 0, start
    while at < len(text):
        match text[at]:
            case "\\":
                at += 1
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return text[start + 1 : at].strip()
        at += 1
    return None


def _unbraced_argument(text: str, start: int) -> str | None:
    """Up to the `$` that closes the formula on the same line, else up to white space."""
    line = text[start:].split("\n", 1)[0]
    content = line.split("$", 1)[0] if "$" in line else line.split(None, 1)[0]
    return content.strip().rstrip(".") or None
