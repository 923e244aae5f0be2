"""Turns: which request a trainer runs next. Each model's requests run in the order of their seq_id, however they arrive;
tenants take turns by the seconds that they have used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

Job: TypeAlias = Callable[[], Awaitable[asyncio.Future[Any] | None]]
"""Runs one request to its end. It raises nothing that a client could cause. What it returns has to be done before it can run:
it is called again then, and others have their turns meanwhile."""


@dataclass(slots=True)
class Line:
    """Requests of one model."""

    tenant: str
    next_seq: int
    ran_through: int = -1
    """Last seq_id that an earlier server ran: what is missing below it was passed there, and is not waited for again."""
    waiting: dict[int, Job] = field(default_factory=dict)
    since: float | None = None
    """When a request arrived whose predecessor has not; None: none waits for one."""
    running: bool = False
    stopped: bool = False
    """None of its requests begins any more."""
    waits: bool = False
    """Its next request returned what it waits for."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while none of its requests runs."""

    @property
    def ready(self) -> bool:
        return not self.running and not self.stopped and not self.waits and self.next_seq in self.waiting


class Turns:
    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._used: dict[str, float] = {}
        """Seconds of the trainer that each tenant has used, counted from the same start."""
        self._changed = asyncio.Event()

    def open(self, model: str, tenant: str, next_seq: int, *, ran_through: int = -1) -> None:
        """`ran_through`: last seq_id that an earlier server ran."""
        self._lines[model] = Line(tenant=tenant, next_seq=next_seq, ran_through=ran_through)

    async def stop(self, model: str) -> None:
        """Lets none of the model's requests begin, and returns when none runs."""
        line = self._lines.get(model)
        if line is None:
            return
        line.stopped = True
        while line.running:
            await line.ended.wait()

    def close(self, model: str) -> list[int]:
        """Seq ids of the requests that will not run."""
        line = self._lines.pop(model, None)
        return [] if line is None else sorted(line.waiting)

    def __contains__(self, model: str) -> bool:
        return model in self._lines

    def passed(self, model: str, seq: int) -> bool:
        """Whether it cannot run in its turn any more: later requests of the model have begun."""
        line = self._lines[model]
        return seq < line.next_seq or seq <= line.ran_through

    def add(self, model: str, seq: int, job: Job) -> None:
        """A request whose turn has not passed, or one that an earlier server ran; those in the order of their seq_id."""
        line = self._lines[model]
        if not self._active(line.tenant):
            # Who has idled has not saved up turns.
            active = [self._used[other.tenant] for other in self._lines.values() if other.waiting or other.running]
            self._used[line.tenant] = max([self._used.get(line.tenant, 0.0), *([min(active)] if active else [])])
        line.waiting[seq] = job
        self._note_gap(line)
        self._changed.set()

    def skip_gaps(self, before: float) -> None:
        """Requests that others have been waiting for since `before` (monotonic time) will not come."""
        for line in self._lines.values():
            if line.since is not None and line.since < before:
                line.next_seq = min(line.waiting)
                self._note_gap(line)
        self._changed.set()

    async def run(self) -> None:
        """Runs one request after the other, for ever."""
        while True:
            line = self._next()
            if line is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            seq = line.next_seq
            job = line.waiting.pop(seq)
            line.next_seq += 1
            line.running, line.since = True, None
            line.ended.clear()
            began = time.monotonic()
            try:
                earlier = await job()
                if earlier is not None:
                    line.waiting[seq], line.next_seq, line.waits = job, seq, True
                    earlier.add_done_callback(partial(self._resume, line))
            finally:
                line.running = False
                line.ended.set()
                self._used[line.tenant] = self._used.get(line.tenant, 0.0) + time.monotonic() - began
                self._note_gap(line)

    def _resume(self, line: Line, earlier: asyncio.Future[Any]) -> None:
        line.waits = False
        self._changed.set()

    def _next(self) -> Line | None:
        ready = [line for line in self._lines.values() if line.ready]
        return min(ready, key=lambda line: self._used.get(line.tenant, 0.0), default=None)

    def _active(self, tenant: str) -> bool:
        return any(line.tenant == tenant and (line.waiting or line.running) for line in self._lines.values())

    def _note_gap(self, line: Line) -> None:
        if not line.running and line.waiting and min(line.waiting) <= line.ran_through:
            line.next_seq = min(line.waiting)
        gap = bool(line.waiting) and not line.running and line.next_seq not in line.waiting
        line.since = (line.since or time.monotonic()) if gap else None
