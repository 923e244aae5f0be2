"""Compares two answers, with rules that are stricter than mathematical equality."""

from __future__ import annotations

import re

from slime_rm_math.normal_form import is_fraction, normal_form
from slime_rm_math.numeral import is_whole

MAX_TEXT_CHARS = 1024
"""Longer texts are no answers: they are compared unchanged."""

_ASSIGNMENT = re.compile(r"[A-Za-z]{1,2}=(?!=)(.+)", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z\s-]{2,}")
_LONG_WORD = re.compile(r"[A-Za-z]{4,}")


def equal(answer: str, label: str, *, max_symbolic_chars: int) -> bool:
    """Whether `answer` equals `label`. Never raises.

    Equal normal forms are equal. Otherwise, in this order: an integer label requires an integer in digits; a fraction
    is compared with a fraction as text (2/4 is no final answer for 1/2); tuples require the same brackets and equal
    elements; the rest, up to `max_symbolic_chars` characters, goes to math-verify.
    """
    if max(len(answer), len(label)) > MAX_TEXT_CHARS:
        return answer.strip() == label.strip() != ""
    normal_answer, normal_label = _without_lone_assignment(normal_form(answer), normal_form(label))
    if not normal_answer or not normal_label:
        return False
    if normal_answer == normal_label or _same_words(normal_answer, normal_label):
        return True
    if is_whole(normal_label) or (is_fraction(normal_label) and is_fraction(normal_answer)):
        return False
    if _LONG_WORD.fullmatch(normal_label):
        # As algebra it would be a product of letters, equal to its anagrams.
        return False
    tuple_answer, tuple_label = split_tuple(normal_answer), split_tuple(normal_label)
    if tuple_answer or tuple_label:
        return (
            tuple_answer is not None
            and tuple_label is not None
            and tuple_answer[:2] == tuple_label[:2]
            and len(tuple_answer[2]) == len(tuple_label[2])
            and all(
                equal(one, other, max_symbolic_chars=max_symbolic_chars)
                for one, other in zip(tuple_answer[2], tuple_label[2], strict=True)
            )
        )
    if max(len(answer), len(label)) > max_symbolic_chars:
        return False
    # This imports sympy, which takes longer than grading a thousand integers.
    from slime_rm_math.symbolic import equivalent

    return equivalent(answer, label)


def split_tuple(normal: str) -> tuple[str, str, list[str]] | None:
    """Opening bracket, closing bracket and elements of a tuple or an interval; None if `normal` is neither.

    >>> split_tuple("(1,(2,3)]")
    ('(', ']', ['1', '(2,3)'])
    >>> split_tuple("(x+1)(x,2)") is None
    True
    """
    if len(normal) < 2 or normal[0] not in "([" or normal[-1] not in ")]":
        return None
    depth, start, elements = 0, 1, []
    for at, character in enumerate(normal):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0 and at < len(normal) - 1:
                return None
        elif character == "," and depth == 1:
            elements.append(normal[start:at])
            start = at + 1
    if depth != 0 or not elements:
        return None
    return normal[0], normal[-1], [*elements, normal[start:-1]]


def _without_lone_assignment(answer: str, label: str) -> tuple[str, str]:
    """Removes `x=` if only one of them is an equation: `x=5` equals 5, but not `y=5`."""
    if ("=" in answer) == ("=" in label):
        return answer, label
    return _right_side(answer), _right_side(label)


def _right_side(text: str) -> str:
    match = _ASSIGNMENT.fullmatch(text)
    return normal_form(match.group(1)) if match and "=" not in match.group(1) else text


def _same_words(answer: str, label: str) -> bool:
    """Whether both are equal words, without case. Single letters, which are variables or choices, are case-sensitive."""
    return _WORDS.fullmatch(label) is not None and answer.casefold() == label.casefold()
