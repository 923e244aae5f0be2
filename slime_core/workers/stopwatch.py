"""Stopwatch: seconds of the parts of a step."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping


class Stopwatch:
    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Adds the time that the body takes to that of `part`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - began

    def taken(self) -> Mapping[str, float]:
        """Metrics `perf/PART_time` since the last call, of the parts that there were."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return {f"perf/{part}_time": value for part, value in seconds.items()}
