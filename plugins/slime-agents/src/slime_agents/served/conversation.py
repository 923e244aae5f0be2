"""Conversation: the calls of one agent as token-exact branches.

Each call is a text that somebody wants continued. What the model wrote stays the tokens that it was; only the rest of a text is
ever tokenised. How a call relates to what is held decides what becomes of it:

- it goes on from a branch, letter by letter: its tail is appended, not trained (clean);
- it goes on, but tells the last response otherwise, and that was shorter than the fork threshold: the response is given up and
  stands there as it is told now, not trained (realign);
- else it is a branch of its own, which begins with what it shares with another one as its prompt. So a turn that two branches
  share is trained once (fork).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime_core.types.completion import Completion


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A stretch of a branch, written by the model (`completion`) or by others."""

    text: str
    token_ids: npt.NDArray[np.int32]
    completion: Completion | None = None


class Branch:
    """What becomes one sample: a prompt, then responses with others' words between them."""

    def __init__(self, prompt: Piece) -> None:
        self.pieces = [prompt]
        self.text = prompt.text
        self.is_waiting = False
        """An answer is on its way: nobody else may go on from here."""
        self.last_answer = -1
        """Number of its last answer, of all in the episode."""

    @property
    def prompt(self) -> Piece:
        return self.pieces[0]

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return joined(self.pieces)

    @property
    def response_length(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces[1:])

    @property
    def num_answers(self) -> int:
        return sum(piece.completion is not None for piece in self.pieces)

    def append(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.text += piece.text

    def drop_last(self) -> None:
        self.text = self.text[: len(self.text) - len(self.pieces.pop().text)]


class Conversation:
    """All branches of one thread of calls."""

    def __init__(self, encode: Callable[[str], npt.NDArray[np.int32]], *, fork_threshold: int) -> None:
        self.branches: list[Branch] = []
        self.num_realigned = 0
        self._encode = encode
        self._fork_threshold = fork_threshold

    def place(self, text: str) -> Branch:
        """The branch that ends with this text now, waiting for an answer."""
        branch = self._extended(text) or self._realigned(text) or self._forked(text)
        branch.is_waiting = True
        return branch

    def answer(self, branch: Branch, text: str, completion: Completion, *, number: int = 0) -> None:
        """`number`: counts up over all answers that are compared with this one."""
        branch.append(Piece(text, completion.token_ids, completion))
        branch.is_waiting = False
        branch.last_answer = number

    def _free(self) -> list[Branch]:
        return [branch for branch in self.branches if not branch.is_waiting]

    def _extended(self, text: str) -> Branch | None:
        longest = max((b for b in self._free() if text.startswith(b.text)), key=lambda b: len(b.text), default=None)
        if longest is not None and (tail := text[len(longest.text) :]):
            longest.append(Piece(tail, self._encode(tail)))
        return longest

    def _realigned(self, text: str) -> Branch | None:
        found, length = None, -1
        for branch in self._free():
            last = branch.pieces[-1]
            if last.completion is None or len(last.token_ids) >= self._fork_threshold:
                continue
            before = len(branch.text) - len(last.text)
            # The same question once more tells nothing about the response to it: that is a fork.
            if length < before < len(text) and text.startswith(branch.text[:before]):
                found, length = branch, before
        if found is None or self._shared(text)[1] > length:
            # None, or it begins with more of another branch.
            return None
        told = Piece(text[length:], self._encode(text[length:]))
        found.drop_last()
        found.append(told)
        self.num_realigned += 1
        return found

    def _forked(self, text: str) -> Branch:
        pieces, length = self._shared(text)
        rest = text[length:]
        shared = [*pieces, Piece(rest, self._encode(rest))] if rest else list(pieces)
        branch = Branch(Piece(text, joined(shared)))
        self.branches.append(branch)
        return branch

    def _shared(self, text: str) -> tuple[Sequence[Piece], int]:
        """The most of a branch that the text begins with, in whole pieces, and its characters."""
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


def joined(pieces: Sequence[Piece]) -> npt.NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *(piece.token_ids for piece in pieces)])
