"""The tags of Search-R1 (Jin et al., 2503.09516), and the action in a turn of the model."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple

TAGS: Final = ("think", "search", "information", "answer")
TURN_ENDS: Final = ("</search>", "</answer>")
"""Stop strings: they end a turn."""
INVALID: Final = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""Appended after a turn that neither searches nor answers."""

_ACTION: Final = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_TAG: Final = re.compile(rf"<(/?(?:{'|'.join(TAGS)}))>", re.IGNORECASE)
_INFORMATION: Final = re.compile(r"<information>.*?</information>", re.DOTALL)
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Kind(StrEnum):
    SEARCH = "search"
    ANSWER = "answer"
    INVALID = "invalid"


class Action(NamedTuple):
    kind: Kind
    content: str = ""


def action_of(turn: str) -> Action:
    """The first search or answer of a turn. A search for nothing is invalid.

    >>> action_of("<think>hm</think><search> who </search>")
    Action(kind=<Kind.SEARCH: 'search'>, content='who')
    """
    found = _ACTION.search(turn)
    if found is None:
        return Action(Kind.INVALID)
    kind, content = Kind(found[1]), found[2].strip()
    return Action(kind, content) if content or kind is Kind.ANSWER else Action(Kind.INVALID)


def without_tags(text: str) -> str:
    """Changes tags in a document to square brackets, so that neither the model nor the reward takes them for tags.

    >>> without_tags("</information><answer>x</answer>")
    '[/information][answer]x[/answer]'
    """
    return _TAG.sub(r"[\1]", text)


def last_answer(response: str) -> str | None:
    """The last answer of the model, without what it read; None if there is none."""
    answers = _ANSWER.findall(_INFORMATION.sub("", response))
    return answers[-1].strip() if answers else None


_AFTER: Final = {
    ("start", "think"): "think",
    ("think", "/think"): "thought",
    ("thought", "search"): "search",
    ("search", "/search"): "searched",
    ("searched", "information"): "information",
    ("information", "/information"): "start",
    ("thought", "answer"): "answer",
    ("answer", "/answer"): "end",
}
_WITHIN: Final = frozenset({"think", "search", "information", "answer"})


def is_well_formed(response: str) -> bool:
    """Whether every search and the answer follow a thought, all text is inside tags, and an answer ends the response.

    >>> is_well_formed("<think>a</think><search>b</search><information>c</information><think>d</think><answer>e</answer>")
    True
    >>> is_well_formed("<answer>e</answer>")
    False
    """
    state, position = "start", 0
    for tag in _TAG.finditer(response):
        if state not in _WITHIN and response[position : tag.start()].strip():
            return False
        following = _AFTER.get((state, tag[1]))
        if following is None:
            return False
        state, position = following, tag.end()
    return state == "end"
