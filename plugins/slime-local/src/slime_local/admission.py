"""Admission: the requests that wait, and which of them come in beside the rows that run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np

from slime_core.types.image import Image
from slime_local.request_row import RequestRow

_REFILL_SHARE: Final = 16
"""Freed rows are refilled when everything that waits fits, or 1/16 of all rows is free: a prefill per finished row
would cost as much as the decode step beside it."""


@dataclass(frozen=True, slots=True)
class Admitted:
    rows: list[RequestRow]
    distinct: list[RequestRow]
    """The first row with each distinct prompt."""
    source: list[int]
    """For each of `rows`, the place of its prompt in `distinct`."""


@dataclass(slots=True, kw_only=True)
class Admission:
    max_running: int
    max_prefill_tokens: int
    kv_cache_bytes: int
    max_context_len: int
    held_elsewhere: Callable[[], int] = lambda: 0
    """Bytes of `kv_cache_bytes` that other decoders use."""
    waiting: deque[RequestRow] = field(default_factory=deque)

    def most_cells(self, token_bytes: int) -> int:
        """Tokens that there is memory for: twice those of the running rows at their longest, as there is room to grow."""
        asked = self.max_running * self.max_context_len
        return 2 * max(self.max_context_len, min(asked, self.kv_cache_bytes // token_bytes))

    def may_admit(self, running: Sequence[RequestRow], token_bytes: int) -> bool:
        """`token_bytes`: keys and values of one token."""
        free = self.max_running - len(running)
        enough = len(self.waiting) <= free or free * _REFILL_SHARE >= self.max_running
        if not self.waiting or not running:
            return bool(self.waiting)
        return free > 0 and enough and self._fits(self.waiting[0], running, token_bytes)

    def _fits(self, row: RequestRow, running: Sequence[RequestRow], token_bytes: int) -> bool:
        longest = max(other.longest for other in (*running, row))
        return (len(running) + 1) * longest * token_bytes <= self.kv_cache_bytes - self.held_elsewhere()

    def take(self, running: Sequence[RequestRow], token_bytes: int) -> Admitted:
        """Takes rows from the head of the queue, at least one, and sets their `shared_tokens`."""
        longest = max((row.longest for row in running), default=0)
        free_bytes = self.kv_cache_bytes - self.held_elsewhere()
        widest = 0
        admitted = Admitted([], [], [])
        places: dict[tuple[bytes, tuple[Image, ...]], int] = {}
        for row in islice(self.waiting, self.max_running - len(running)):
            prompt = (np.asarray(row.request.token_ids, np.int32).tobytes(), row.request.images)
            longest = max(longest, row.longest)
            widest = max(widest, row.prompt_length)
            prompts = len(places) + (prompt not in places)
            memory = (len(running) + len(admitted.rows) + 1) * longest * token_bytes
            if admitted.rows and (prompts * widest > self.max_prefill_tokens or memory > free_bytes):
                break
            row.shared_tokens = row.prompt_length if prompt in places else 0
            if prompt not in places:
                admitted.distinct.append(row)
            admitted.source.append(places.setdefault(prompt, len(places)))
            admitted.rows.append(row)
        for _ in admitted.rows:
            self.waiting.popleft()
        return admitted
