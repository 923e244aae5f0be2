"""HangWatch: notices that a worker's event loop does not turn any more, from the reports of a thread in its process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Final

from slime_core.registry.call_limit import NUM_CHECKS
from slime_rollout_workers.messages import LoopReport

WARN_S: Final = 10.0
"""Seconds after which blocked code is named on stderr, as in the driver."""


def report_interval(limit_s: float) -> float:
    return limit_s / NUM_CHECKS


class HangWatch:
    """Counts checks without a report of a turning loop, not seconds: if the driver was stopped and continues, one has passed.

    While the worker starts, imports and models may block its loop for long: until `begin` any report is enough.
    """

    def __init__(
        self, name: str, limit_s: float, *, on_hang: Callable[[str], None], on_blocked: Callable[[float, str], None]
    ) -> None:
        """`on_hang` is called with the reason, once, when the loop has not turned for `limit_s`. `on_blocked` is called with
        seconds and location when a loop that was blocked for `WARN_S` turns again, or one is given up."""
        self._name = name
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._on_blocked = on_blocked
        self._starting = True
        self._idle_checks = 0
        self._blocked: LoopReport | None = None
        """The last report, if the loop was blocked."""
        self._warned = False
        self._next_check: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Called when the worker is ready."""
        self._starting = False
        self._idle_checks = 0

    def close(self) -> None:
        if self._next_check is not None:
            self._next_check.cancel()

    def take(self, report: LoopReport) -> None:
        if self._next_check is None:
            # Before its first report a process imports what it needs.
            self._check_later()
        if report.turns or self._starting:
            self._idle_checks = 0
        if report.turns and report.blocked_s >= WARN_S:
            self._pass_on(report)
        self._blocked = None if report.turns else report
        if report.turns:
            self._warned = False
        elif report.blocked_s >= WARN_S and not self._warned:
            self._warned = True
            print(
                f"warning: the event loop of {self._name} has been blocked for {report.blocked_s:.0f} s in {report.where}. "
                "What waits there must await: asyncio.to_thread, or an asynchronous client.",
                file=sys.stderr,
                flush=True,
            )

    def _pass_on(self, report: LoopReport) -> None:
        # What an observer raises is none of the caller's.
        asyncio.get_running_loop().call_soon(self._on_blocked, report.blocked_s, f"{self._name}: {report.where}")

    def _check_later(self) -> None:
        self._next_check = asyncio.get_running_loop().call_later(report_interval(self._limit_s), self._check)

    def _check(self) -> None:
        self._idle_checks += 1
        if self._idle_checks <= NUM_CHECKS:
            self._check_later()
        elif self._blocked is None:
            self._on_hang(
                f"its process has reported nothing for {self._limit_s:g} s (--rollout-worker-timeout): it was stopped, or is "
                "in code that does not release the interpreter"
            )
        else:
            self._pass_on(self._blocked)
            self._on_hang(
                f"its event loop did not turn for {self._limit_s:g} s (--rollout-worker-timeout), blocked in "
                f"{self._blocked.where}. What waits there must await: asyncio.to_thread, or an asynchronous client"
            )
