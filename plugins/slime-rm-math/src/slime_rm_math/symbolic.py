"""Equality by computer algebra (math-verify over sympy). Importing this module takes about a second."""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from slime_rm_math.cost import is_affordable
from slime_rm_math.normal_form import plain_latex
from slime_rm_math.probe import are_apart

# Both warn once per process that their timeouts are off. This is on purpose: they require SIGALRM in the main thread, and
# slime limits the time of reward processes itself.
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)

_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=-1),)

_MAX_DEPTH = 8
_MAX_BARS = 8
_MAX_POWERS = 24
# These are evaluated during parsing.
_EAGER = re.compile(r"gcd|lcm|binom|choose")
_LARGE = re.compile(r"[0-9]{4}|\^|!")


def equivalent(answer: str, label: str) -> bool:
    """Whether math-verify finds the two LaTeX expressions equal. Never raises.

    False for what cannot be parsed and for what could take very long (see `cost`).
    """
    parsed_label = _parse(label)
    if parsed_label is None:
        return False
    parsed_answer = _parse(answer)
    if parsed_answer is None:
        return False
    if are_apart(parsed_label, parsed_answer):
        return False
    return bool(verify(parsed_label, parsed_answer, timeout_seconds=None))


def _parse(text: str) -> Any | None:
    text = " ".join(plain_latex(text).split())
    if not _is_parsable(text):
        return None
    found = parse(
        f"${text}$",
        extraction_config=_EXTRACTION,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found[0] if found and is_affordable(found[0]) else None


def _is_parsable(text: str) -> bool:
    """The parser takes seconds for a few tens of nested brackets, bars or powers."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return (
        deepest <= _MAX_DEPTH
        and text.count("|") <= _MAX_BARS
        and text.count("^") <= _MAX_POWERS
        and not (_EAGER.search(text) and _LARGE.search(text))
    )
