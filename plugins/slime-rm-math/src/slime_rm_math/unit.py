"""Units after a number: `5 \\text{ cm}`, `12 dollars`, `9 cm^2`."""

from __future__ import annotations

import re

MAX_CHARS = 256
"""A number with its unit is never longer."""

# fmt: off
_SHORT_UNITS = frozenset((
    "cm", "mm", "dm", "km", "nm", "kg", "mg", "ml", "cl", "ft", "in", "yd", "mi", "mph", "kph", "kmh", "hr",
    "hrs", "min", "sec", "ms", "lb", "lbs", "oz", "gal", "mol", "deg", "rad", "day", "men", "cup", "way",
    "one", "sq", "cc", "cu", "bit", "per",
))
# fmt: on
"""Words of two and three letters that are units; others may be products of variables (2 xy)."""

# fmt: off
_NOT_UNITS = frozenset((
    "or", "and", "to", "mod", "base", "times", "plus", "minus", "over", "sqrt", "frac", "infinity", "hundred",
    "thousand", "million", "billion", "trillion", "dozen", "score", "half", "third", "thirds", "quarter",
    "quarters",
))
# fmt: on
"""Words after a number that change its value."""

_NUMBER = r"(?P<number>(?:[-+*/^0-9.,(){}\s]|\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z]))*[0-9})](?:\s*\\pi)?)"
_POWER = r"(?:\s*\^\s*\{?\s*-?[1-3]\s*\}?)?"
_IN_FONT = re.compile(_NUMBER + r"\s*\\(?:text|mbox|textrm|mathrm|textit)\s*\{(?P<unit>[^{}]*)\}" + _POWER + r"\s*\.?")
_BARE = re.compile(_NUMBER + r"\s*(?<=\s)(?P<unit>[A-Za-z]{2,}(?:[\s./]+[A-Za-z]{2,})*)" + _POWER + r"\s*\.?")


def without_unit(text: str) -> str:
    """The number alone if `text` is a number and a unit, else `text`."""
    if len(text) > MAX_CHARS:
        return text
    for pattern, known in ((_IN_FONT, _is_unit), (_BARE, _is_bare_unit)):
        match = pattern.fullmatch(text)
        if match and known(match.group("unit")):
            return match.group("number").strip()
    return text


def _words(unit: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", unit.lower())


def _is_unit(unit: str) -> bool:
    words = _words(unit)
    return not any(character.isdigit() for character in unit) and _NOT_UNITS.isdisjoint(words)


def _is_bare_unit(unit: str) -> bool:
    return _is_unit(unit) and all(len(word) > 3 or word in _SHORT_UNITS for word in _words(unit))
