"""Stopwatch: what the time of a run was spent on, without gaps."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from slime_core.types.report import Lap

OTHER: Final = "other"
MOST_SPANS: Final = 1000
"""Of a lap. Further ones are counted, but not listed."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """What a run's start was spent on; parts overlap."""

    began: float
    """On the clock of `time.perf_counter`, as the seconds of `spans`."""
    spans: list[tuple[str, float, float]]
    """(part, start, end)"""

    @classmethod
    def of_driver(cls, began: float | None) -> StartTimes:
        """With what the driver has done since `began`; None: nothing."""
        now = time.perf_counter()
        return cls(now, []) if began is None else cls(began, [("driver", began, now)])

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spans.append((part, began, time.perf_counter()))

    def add(self, lane: str, began: float, seconds: Mapping[str, float]) -> None:
        """Parts of a lane that follow each other; the rest of the time since `began` is its `other`."""
        for part, length in seconds.items():
            self.spans.append((f"{lane}/{part}", began, began + length))
            began += length
        self.spans.append((f"{lane}/other", began, max(began, time.perf_counter())))

    def ready(self, lap: Lap) -> Lap:
        """The time since the beginning, with what was done in `lap`, which has just ended."""
        seconds = time.perf_counter() - self.began
        before = seconds - lap.seconds
        spans = [(part, start - self.began, end - self.began) for part, start, end in self.spans]
        spans += [(part, before + start, before + end) for part, start, end in lap.spans if part != OTHER]
        parts: defaultdict[str, float] = defaultdict(float)
        for part, start, end in spans:
            parts[part] += end - start
        return Lap(began=time.time() - seconds, seconds=seconds, parts=parts, spans=spans)


class Stopwatch:
    """Divides the time of a run into parts. Every instant counts for one: the one that began last of those under way, so that a
    part within another is not counted twice; `other` if none is under way."""

    def __init__(self) -> None:
        self._under_way: list[list[str]] = []
        self._began = self._marked = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Counts the time of the body for `part`."""
        self._mark()
        self._seconds[part] += 0.0
        own = [part]
        self._under_way.append(own)
        try:
            yield
        finally:
            self._mark()
            # Of several tasks, the one that began last may not be the first to end.
            self._under_way = [one for one in self._under_way if one is not own]

    def lap(self) -> Lap:
        """The time since the last call."""
        self._mark()
        began, self._began = self._began, self._marked
        seconds, self._seconds = self._seconds, defaultdict(float)
        spans, self._spans = self._spans, []
        return Lap(
            began=time.time() - (time.perf_counter() - began),
            seconds=self._began - began,
            parts={OTHER: 0.0, **seconds},
            spans=[(part, start - began, end - began) for part, start, end in spans],
        )

    def _mark(self) -> None:
        now, before = time.perf_counter(), self._marked
        self._marked = now
        if now <= before:
            return
        part = self._under_way[-1][0] if self._under_way else OTHER
        self._seconds[part] += now - before
        if self._spans and self._spans[-1][0] == part:
            self._spans[-1] = (part, self._spans[-1][1], now)
        elif len(self._spans) < MOST_SPANS:
            self._spans.append((part, before, now))
