"""Scenes that play in an event loop of their own, with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")
PATIENCE_S: Final = 60.0


def run(work: Coroutine[Any, Any, T], patience_s: float = PATIENCE_S) -> T:
    """What the scene returns; AssertionError if it takes for ever."""

    async def soon() -> T:
        # A scene that fails may leave tasks with errors behind, which are no news.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        try:
            return await asyncio.wait_for(work, patience_s)
        except TimeoutError:
            raise AssertionError(f"it has not ended within {patience_s:g} s") from None

    return asyncio.run(soon())
