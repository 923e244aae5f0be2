"""Conversation: the calls of one agent as token-exact branches.

Each call is a text to be continued. What the model wrote keeps its tokens; only the rest of a text is tokenized. Three cases:

- The text continues a branch, character by character: its tail is appended, not trained (clean).
- The text repeats the last response of a branch differently, and that response is shorter than the fork threshold: the new
  text replaces the response and is not trained (realign).
- Otherwise the text becomes a new branch. What it shares with another branch is its prompt, so a turn that two branches share
  is trained once (fork).

A text that leaves no room for a response is not appended to a branch: nothing after it could be trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slime_core.types.completion import Completion


class Encode(Protocol):
    def __call__(self, text: str, most: int | None) -> npt.NDArray[np.int32] | None:
        """(T,) int32 tokens; None if they are more than `most`."""


class NoRoom(Exception):
    """The text leaves no room for a response. `branch`: the one that it continues, unchanged; None: it continues none."""

    def __init__(self, branch: Branch | None) -> None:
        super().__init__()
        self.branch = branch


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of a branch. `completion` is set if the model wrote it."""

    text: str
    token_ids: npt.NDArray[np.int32]
    completion: Completion | None = None


class Branch:
    """One sample: a prompt, then responses of the model with other texts between them."""

    def __init__(self, prompt: Piece) -> None:
        self.pieces = [prompt]
        self.text = prompt.text
        self.is_waiting = False
        """Whether a response is being generated. No other call may then continue this branch."""
        self.is_cut = False
        """Whether a text that would continue it left no room for a response."""
        self.num_constrained = 0
        """Responses that were sampled under a constraint."""
        self.last_response = -1
        """Number of its last response, counted over the whole episode; -1 if it has none."""

    @property
    def prompt(self) -> Piece:
        return self.pieces[0]

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return joined(self.pieces)

    @property
    def response_length(self) -> int:
        return num_tokens(self.pieces[1:])

    @property
    def num_responses(self) -> int:
        return sum(piece.completion is not None for piece in self.pieces)

    def append(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.text += piece.text

    def drop_last(self) -> None:
        self.text = self.text[: len(self.text) - len(self.pieces.pop().text)]


class Conversation:
    """All branches of one thread of calls."""

    def __init__(
        self, encode: Encode, *, fork_threshold: int, max_response: int | None = None, max_context: int | None = None
    ) -> None:
        """`max_response`: tokens of a branch after its prompt; `max_context`: all tokens of a branch. None: no limit."""
        self.branches: list[Branch] = []
        self.num_realigned = 0
        self._encode = encode
        self._fork_threshold = fork_threshold
        self._max_response = max_response
        self._max_context = max_context

    def place(self, text: str) -> Branch:
        """Returns the branch that now ends with this text, and marks it as waiting for a response. Raises NoRoom."""
        branch = self._extended(text) or self._realigned(text) or self._forked(text)
        branch.is_waiting = True
        return branch

    def add_response(self, branch: Branch, text: str, completion: Completion, *, number: int = 0) -> None:
        """Appends the model's response. `number`: increases with each response of the episode."""
        branch.append(Piece(text, completion.token_ids, completion))
        branch.is_waiting = False
        branch.last_response = number

    def num_tokens(self, text: str) -> int:
        """How many tokens the branch would have that `place` returns."""
        pieces, length = self._shared(text)
        rest = self._encode(text[length:], None)
        assert rest is not None
        return num_tokens(pieces) + len(rest)

    def _free(self) -> list[Branch]:
        return [branch for branch in self.branches if not branch.is_waiting]

    def _extended(self, text: str) -> Branch | None:
        longest = max((b for b in self._free() if text.startswith(b.text)), key=lambda b: len(b.text), default=None)
        if longest is not None and (tail := text[len(longest.text) :]):
            longest.append(self._fitting(tail, longest.pieces, longest))
        return longest

    def _realigned(self, text: str) -> Branch | None:
        found, length = None, -1
        for branch in self._free():
            last = branch.pieces[-1]
            if last.completion is None or len(last.token_ids) >= self._fork_threshold:
                continue
            before = len(branch.text) - len(last.text)
            # A text that ends before the response does not repeat it: that is a fork.
            if length < before < len(text) and text.startswith(branch.text[:before]):
                found, length = branch, before
        if found is None or self._shared(text)[1] > length:
            # No branch, or the text shares a longer beginning with another branch.
            return None
        replacement = self._fitting(text[length:], found.pieces[:-1], found)
        found.drop_last()
        found.append(replacement)
        self.num_realigned += 1
        return found

    def _forked(self, text: str) -> Branch:
        pieces, length = self._shared(text)
        rest = text[length:]
        shared = [*pieces, self._fitting(rest, pieces, None)] if rest else list(pieces)
        branch = Branch(Piece(text, joined(shared)))
        self.branches.append(branch)
        return branch

    def _fitting(self, text: str, before: Sequence[Piece], branch: Branch | None) -> Piece:
        """The text as a piece, after which there is room for at least one token. `branch`: None: it belongs to the prompt."""
        rooms = [] if self._max_context is None else [self._max_context - num_tokens(before)]
        if branch is not None and self._max_response is not None:
            rooms.append(self._max_response - num_tokens(before[1:]))
        tokens = self._encode(text, min(rooms) - 1 if rooms else None)
        if tokens is None:
            raise NoRoom(branch)
        return Piece(text, tokens)

    def _shared(self, text: str) -> tuple[Sequence[Piece], int]:
        """The longest beginning that the text shares with a branch: its pieces, and its length in characters."""
        best: tuple[Sequence[Piece], int] = ((), 0)
        for branch in self.branches:
            length = 0
            for number, piece in enumerate(branch.pieces):
                if not text.startswith(piece.text, length):
                    break
                length += len(piece.text)
                if length > best[1]:
                    best = (branch.pieces[: number + 1], length)
        return best


def num_tokens(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.token_ids) for piece in pieces)


def joined(pieces: Sequence[Piece]) -> npt.NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *(piece.token_ids for piece in pieces)])
