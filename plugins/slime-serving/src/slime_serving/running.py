"""Running: one request with its response so far, also when it continues with new weights."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_core.errors import EngineError
from slime_core.types.completion import Completion, FinishReason, GenerateRequest
from slime_core.types.sample import VersionSpan

INITIAL: Final = "default"
"""Version label of the weights that a server started with, in SGLang and in vLLM."""
SLACK: Final = 1e-3
"""How far rounding may put a log-prob above 0."""


def version_of(label: object) -> int:
    """The policy version of a label; -1 for the weights that a server started with. Raises ValueError for a label that slime
    did not set."""
    return -1 if label == INITIAL else int(str(label))


class RequestIds:
    """Ids for servers: they begin with the run's ids; none is used twice or is a prefix of another.

    SGLang aborts all requests whose id begins with an aborted id, and sometimes one that reuses the id of a finished request.
    """

    def __init__(self) -> None:
        self._start = secrets.token_hex(4)
        self._count = itertools.count()

    def next_for(self, request_id: str) -> str:
        return f"{request_id}#{self._start}-{next(self._count)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a response that one call returned."""

    token_ids: npt.NDArray[np.integer[Any]]
    log_probs: npt.NDArray[np.floating[Any]]
    """Nats, one for each token."""
    spans: Sequence[tuple[int, int, int]]
    """(version, start, end) of ranges of these tokens, in order."""
    cached_tokens: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Running(ABC):
    """A request and its response so far. A subclass writes the calls of a serving program and reads its responses."""

    request: GenerateRequest
    vocab_size: int
    rid: str = ""
    """Id of the part that is on a server."""
    part: int = 0
    """How often it was interrupted."""
    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    log_probs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    sweep: int = 0
    """Number of completed abort-all calls of the engine when this part was sent."""
    aborted: bool = False
    task: asyncio.Task[Completion] | None = None
    given_up: bool = False
    """Its task was cancelled because a paused server kept it for too long after an abort."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by an abort, if the request waits here, and when there is a response."""

    @abstractmethod
    def body(self, room: int) -> dict[str, Any]:
        """The body of a call that generates at most `room` further tokens, under the id `rid`."""

    @abstractmethod
    def take(self, reply: Any, *, expected_version: int | None, server: str) -> FinishReason:
        """Adds a part of the response (see `add`), and returns why it ended. Raises EngineError for an invalid response.
        `expected_version`: version of all its tokens, if no weights can have changed meanwhile."""

    def tokens(self) -> npt.NDArray[np.int32]:
        """(T,) prompt and response so far."""
        given = self.request.token_ids
        return np.concatenate([given, self.token_ids]) if len(self.token_ids) else np.ascontiguousarray(given)

    def add(self, part: Part, *, expected_version: int | None, server: str) -> None:
        """Adds a part. Raises EngineError, and adds nothing, if it is not what was requested."""
        if problem := self._problem(part, expected_version):
            raise EngineError(f"{server}: the response to {self.request.request_id} is wrong: {problem}.")
        offset = len(self.token_ids)
        token_ids, log_probs = (
            part.token_ids.astype(np.int32, copy=False),
            part.log_probs.astype(np.float32, copy=False),
        )
        self.token_ids = np.concatenate([self.token_ids, token_ids]) if offset else token_ids
        self.log_probs = np.concatenate([self.log_probs, log_probs]) if offset else log_probs
        for version, start, end in part.spans:
            self._add_span(version, start + offset, end + offset)
        if not self.part:
            self.cached_tokens = part.cached_tokens

    def invalid(self, server: str, reply: Any, error: Exception) -> EngineError:
        """The error of a response that does not have the expected form."""
        return EngineError(
            f"{server}: the response to {self.request.request_id} is invalid: {type(error).__name__}: {error}. It is "
            f"{str(reply)[:300]}"
        )

    def _problem(self, part: Part, expected_version: int | None) -> str:
        room = self.request.sampling.max_new_tokens - len(self.token_ids)
        ids, log_probs = part.token_ids, part.log_probs
        versions = {version for version, _, _ in part.spans}
        if len(part.token_ids) > room:
            return f"it has {len(part.token_ids)} tokens, more than the {room} requested"
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
            return f"token {wrong[0]} is not in the model's vocabulary of {self.vocab_size}"
        # Comparisons with NaN are false.
        if len(log_probs) and not -np.inf < log_probs.min() <= log_probs.max() <= SLACK:
            odd = log_probs[~((log_probs <= SLACK) & (log_probs > -np.inf))]
            return f"{odd[0]} is not a log-prob"
        if expected_version is not None and versions - {expected_version}:
            return (
                f"its tokens have version {', '.join(map(str, sorted(versions)))}, but the server was sent version "
                f"{expected_version}"
            )
        return ""

    def _add_span(self, version: int, start: int, end: int) -> None:
        if start == end:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, end=end))

    def kept(self) -> int:
        """How many tokens stay when the request is interrupted. A stop string may begin in this part and end in the next,
        where a server checks only the new tokens: so the last tokens, as many as a stop string may have, are generated
        again. A server begins a grammar again with every part."""
        if self.request.sampling.structural_tag is not None:
            return 0
        longest = max((len(text) for text in self.request.sampling.stop), default=0)
        return max(0, len(self.token_ids) - longest)

    def interrupt(self) -> None:
        """Prepares the next part."""
        keep = self.kept()
        self.token_ids, self.log_probs = self.token_ids[:keep], self.log_probs[:keep]
        self.spans = [
            VersionSpan(version=span.version, start=span.start, end=min(span.end, keep))
            for span in self.spans
            if span.start < keep
        ]
        self.part += 1

    def completion(self, reason: FinishReason, engine_index: int, **others: Any) -> Completion:
        """`others`: fields of the completion that a program fills in."""
        return Completion(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            log_probs=np.minimum(self.log_probs, np.float32(0)),
            finish_reason=reason,
            spans=tuple(self.spans),
            cached_tokens=self.cached_tokens,
            engine_index=engine_index,
            **others,
        )


def covering_spans(given: Sequence[Mapping[str, Any]], count: int) -> list[tuple[int, int, int]]:
    """(version, start, end) of the tokens of a response. Raises ValueError if they are not the ranges of `count` tokens."""
    if not count:
        return []
    spans = [(version_of(span["version"]), int(span["start"]), int(span["end"])) for span in given]
    starts, ends = [start for _, start, _ in spans], [end for _, _, end in spans]
    if starts != [0, *ends[:-1]] or ends[-1] != count or any(end < start for _, start, end in spans):
        raise ValueError(f"its version spans {spans} do not cover its {count} tokens")
    return spans


Rows: TypeAlias = "Sequence[Mapping[Any, Any]] | Sequence[Sequence[Any]] | TokenRows"


class TokenRows:
    """The rows of a response as arrays: they pass between processes at a hundredth of what lists cost."""

    __slots__ = ("by_key", "count")

    def __init__(self, by_key: Mapping[Any, npt.NDArray[Any]], count: int) -> None:
        self.by_key = by_key
        self.count = count

    @classmethod
    def of(cls, rows: Rows, columns: Mapping[Any, type[np.generic]]) -> TokenRows:
        """columns: dtypes by key. Raises what `column` raises."""
        return cls({key: column(rows, key, dtype) for key, dtype in columns.items()}, len(rows))

    def __len__(self) -> int:
        return self.count

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenRows, (self.by_key, self.count)


INVALID: Final = (KeyError, TypeError, ValueError, IndexError, OverflowError)
"""What reading an invalid response raises."""


def column(rows: Rows, key: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """A column of the rows of a response. Raises TypeError and ValueError for what is not a number."""
    if isinstance(rows, TokenRows):
        return rows.by_key[key]
    return np.fromiter([row[key] for row in rows], dtype, len(rows))
