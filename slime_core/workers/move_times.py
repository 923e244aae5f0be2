"""Seconds of offloading memory from devices and of onloading it again."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping


class MoveTimes:
    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def of(self, move: str) -> Iterator[None]:
        """`sleep` and `wake_up` of trainers, `engine_sleep` and `engine_wake_up`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[move] += time.perf_counter() - began

    def taken(self) -> Mapping[str, float]:
        """Metrics `perf/sleep_time` and so on since the last call. Empty if nothing was moved."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return {f"perf/{move}_time": value for move, value in seconds.items()}
