"""Numbers in ASCII digits."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 100
"""Numbers of more digits are not converted: they are no answers, and big integers are slow."""

_WHOLE = re.compile(r"[-+]?[0-9]+")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]*)?")
# A minus directly after a digit, letter or closing bracket is a subtraction or a dash, not a sign.
_IN_TEXT = re.compile(r"(?:(?<![\w)\]}])[-+])?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


def is_whole(text: str) -> bool:
    """Whether the whole text is an integer in digits."""
    return _WHOLE.fullmatch(text) is not None


def canonical(text: str) -> str | None:
    """The canonical form of a number: no thousands separators, plus sign or extra zeros. None if `text` is no number.

    >>> [canonical(text) for text in ("1,000", "+2.50", "007", "-0", ".5", "x")]
    ['1000', '2.5', '7', '0', '0.5', None]
    """
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    elif not _DECIMAL.fullmatch(text):
        return None
    sign = "-" if text.startswith("-") else ""
    whole, _, decimals = text.lstrip("+-").partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    if whole == "0" and not decimals:
        return "0"
    return f"{sign}{whole}.{decimals}" if decimals else sign + whole


def numbers_in(text: str) -> list[str]:
    """All numbers of a text as they are written, in order.

    >>> numbers_in("5-3 is 2, and 1,200.50 is -.5 off.")
    ['5', '3', '2,', '1,200.50', '-.5']
    """
    return _IN_TEXT.findall(text)


def value(number: str) -> Fraction | None:
    """The exact value of one of `numbers_in`; None if it has more than `MAX_DIGITS` digits."""
    digits = number.replace(",", "")
    return Fraction(digits) if len(digits) <= MAX_DIGITS else None
