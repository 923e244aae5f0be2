"""RolloutTrace: times of samples: one line per sample in traces.jsonl, and the perf metrics of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from slime_core.algorithm.metrics import distribution
from slime_core.atomic_io.storage import written


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One engine call."""

    request_id: str
    queue_s: float
    """Seconds that it waited before it was sent to an engine."""
    generate_s: float
    """Seconds in the engine, transfers included."""
    prompt_tokens: int
    tokens: int
    cached_tokens: int
    """Prompt tokens in the engine's prefix cache."""
    engine: int
    finish: str
    extra: Mapping[str, float] = field(default_factory=dict)
    """The engine's own counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTrace:
    """One attempt at a response."""

    index: int
    attempt: int
    began: float
    """Seconds since the epoch."""
    seconds: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTrace:
    """All responses to a prompt, and their rewards."""

    scope: str
    """`train`, or `eval-` and the name of a set."""
    group_index: int
    reward_s: float
    responses: Sequence[ResponseTrace]


class RolloutTrace:
    """Collects the traces of groups as they end."""

    def __init__(self, path: Path | None) -> None:
        """`path`: file with one line per sample; None: only metrics."""
        self._path = path
        self._file: IO[str] | None = None
        self._trained: list[GroupTrace] = []

    def add(self, trace: GroupTrace) -> None:
        if trace.scope == "train":
            self._trained.append(trace)
        if self._path is None:
            return
        with written(self._path):
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            for response in trace.responses:
                self._file.write(json.dumps(line(trace, response)) + "\n")
            self._file.flush()

    def metrics(self) -> dict[str, float]:
        """Metrics of the training groups that ended since the last call."""
        groups, self._trained = self._trained, []
        responses = [response for group in groups for response in group.responses]
        turns = [turn for response in responses for turn in response.turns]
        if not turns:
            return {}
        sent = sum([turn.prompt_tokens for turn in turns])
        cached = sum([turn.cached_tokens for turn in turns])
        queue_s, generate_s, tokens = np.array([(turn.queue_s, turn.generate_s, turn.tokens) for turn in turns]).T
        written = (tokens > 0) & (generate_s > 0)
        response_of = np.repeat(np.arange(len(responses)), [len(response.turns) for response in responses])
        in_engine = np.bincount(response_of, queue_s + generate_s, len(responses))
        other_s = np.maximum(0.0, np.array([response.seconds for response in responses]) - in_engine)
        return {
            **distribution("perf/request/queue_time", queue_s),
            **distribution("perf/request/generate_time", generate_s),
            **distribution("perf/decode/tok_per_s", tokens[written] / generate_s[written]),
            **distribution("perf/non_generation_time", other_s),
            **distribution("perf/reward_time", np.array([group.reward_s for group in groups])),
            "rollout/prefix_cache_hit_rate": cached / sent if sent else 0.0,
            "rollout/avg_cached_tokens_per_sample": cached / len(responses),
            **speculation(turns),
        }

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def line(trace: GroupTrace, response: ResponseTrace) -> dict[str, Any]:
    """`other_s`: seconds in the generator and its tools."""
    queue_s, generate_s = (sum(getattr(turn, name) for turn in response.turns) for name in ("queue_s", "generate_s"))
    return {
        "scope": trace.scope,
        "group": trace.group_index,
        "sample": response.index,
        "attempt": response.attempt,
        "began": round(response.began, 6),
        "seconds": round(response.seconds, 6),
        "queue_s": round(queue_s, 6),
        "generate_s": round(generate_s, 6),
        "other_s": round(max(0.0, response.seconds - queue_s - generate_s), 6),
        "reward_s": round(trace.reward_s, 6),
        "turns": [asdict(turn) for turn in response.turns],
    }


def speculation(turns: Sequence[Turn]) -> dict[str, float]:
    """Means of the counters of speculative decoding."""
    names = ("spec_accept_rate", "spec_accept_length")
    reported = {name: [turn.extra[name] for turn in turns if name in turn.extra] for name in names}
    return {f"rollout/{name}": float(np.mean(values)) for name, values in reported.items() if values}
