"""Tasks that wait for engines, ended together: their requests are aborted before they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from slime_core.rollout.groups import all_or_none

T = TypeVar("T")
GRACE_S: Final = 5.0
"""For tasks that do not end with their requests, such as a tool call."""
LONGEST_INTERVAL_S: Final = 1.0


async def all_or_aborted(tasks: Sequence[asyncio.Task[T]], abort: Callable[[], Awaitable[object]]) -> list[T]:
    """`all_or_none` for tasks whose requests `abort` ends. A task that is cancelled first takes its requests along: the
    engines would generate on, and refuse the same requests until then."""
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.cancelled() or task.exception() is not None for task in tasks if task.done()):
            await end(tasks, abort)
    except asyncio.CancelledError:
        try:
            await end(tasks, abort)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return await all_or_none(tasks)


async def end(tasks: Sequence[asyncio.Task[Any]], abort: Callable[[], Awaitable[object]]) -> None:
    """Repeats the abort, since an engine may not have received a request yet."""
    interval, waited = 0.01, 0.0
    while waited < GRACE_S and (left := [task for task in tasks if not task.done()]):
        await abort()
        await asyncio.wait(left, timeout=interval)
        waited += interval
        interval = min(2 * interval, LONGEST_INTERVAL_S)
