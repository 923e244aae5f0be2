"""Starts a server, and waits until it responds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from slime_core.errors import EngineError
from slime_serving.server_group import Started

POLL_S: Final = 0.25
RESPONSE_S: Final = 3.0
"""Time limit of a request while a server starts: it may accept a connection and not respond."""
ATTEMPTS: Final = 3
"""Number of ports that are tried: another process may take a free port before the server uses it."""

S = TypeVar("S", bound=Started[Any])


async def start_until_up(
    name: str,
    program: str,
    log: Path,
    begin: Callable[[], S],
    is_up: Callable[[S], Awaitable[None]],
    *,
    timeout_s: float,
) -> S:
    """Calls `begin`, which starts the process on a free port, and returns when `is_up` raises no EngineError. Raises
    EngineError with the last lines of `log` if the server dies, or does not respond within `timeout_s`; nothing of it is left
    then."""
    deadline = time.monotonic() + timeout_s
    for attempt in range(1, ATTEMPTS + 1):
        started = begin()
        process = started.process
        try:
            if await responds(started, is_up, deadline):
                return started
        except BaseException:
            # The error that stopped the start is raised, not one of `stop`.
            with contextlib.suppress(EngineError):
                await process.stop()
            raise
        finally:
            for port in started.held:
                port.close()
        hangs = process.exit_code is None and not process.cannot_listen
        why = "cannot listen" if process.exit_code is None else process.why
        await process.stop()
        if hangs:
            raise EngineError(
                f"{name}: {program} has not responded in {timeout_s:g} s (engine.start_timeout). Last lines of "
                f"{log}:\n{process.last_lines()}"
            )
        if not process.found_its_port_taken or attempt == ATTEMPTS:
            break
    raise EngineError(f"{name}: {program} {why} at start. Last lines of {log}:\n{process.last_lines()}")


async def responds(started: S, is_up: Callable[[S], Awaitable[None]], deadline: float) -> bool:
    """Returns False if the server has died or cannot listen, or the deadline has passed."""
    process = started.process
    while process.exit_code is None and not process.cannot_listen and time.monotonic() < deadline:
        try:
            await is_up(started)
            return True
        except EngineError:
            await asyncio.sleep(POLL_S)
    return False
