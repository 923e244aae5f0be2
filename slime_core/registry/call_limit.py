"""CallLimit: ends calls that wait for something that never happens. Calls may take long while others begin and end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final

NUM_CHECKS: Final = 20
"""Checks within the limit. If this process is stopped and continues (SIGSTOP, a suspended job), one of them has passed."""


class CallLimit:
    """Calls of one plugin, or to the ranks of one role. If none of them has begun or ended for `seconds`, all that are under
    way are cancelled, and raise what `error` makes of their names."""

    def __init__(self, seconds: float, error: Callable[[Sequence[str]], Exception]) -> None:
        self._seconds = seconds
        self._error = error
        self._calls: dict[asyncio.Timeout, str] = {}
        self._passed_on = 0
        self._idle_checks = 0
        self._next_check: asyncio.TimerHandle | None = None
        self.exceeded: Exception | None = None
        """What the last calls that were cancelled raise."""

    @contextlib.asynccontextmanager
    async def call(self, name: str) -> AsyncIterator[None]:
        """Around one call."""
        self._idle_checks = 0
        if self._next_check is None:
            self._check_later()
        try:
            async with asyncio.timeout(None) as timeout:
                self._calls[timeout] = name
                try:
                    yield
                finally:
                    del self._calls[timeout]
                    self._idle_checks = 0
        except TimeoutError:
            if timeout.expired() and self.exceeded is not None:
                raise self.exceeded from None
            raise

    @contextlib.contextmanager
    def passed_on(self) -> Iterator[None]:
        """Around what a call waits for and others do. The limit begins anew when nothing is passed on any more."""
        self._passed_on += 1
        try:
            yield
        finally:
            self._passed_on -= 1
            self._idle_checks = 0

    def _check_later(self) -> None:
        self._next_check = asyncio.get_running_loop().call_later(self._seconds / NUM_CHECKS, self._check)

    def _check(self) -> None:
        self._next_check = None
        if not self._calls:
            return
        self._idle_checks = 0 if self._passed_on else self._idle_checks + 1
        if self._idle_checks == NUM_CHECKS:
            self.exceeded = self._error(list(self._calls.values()))
            for timeout in self._calls:
                timeout.reschedule(asyncio.get_running_loop().time())
        self._check_later()
