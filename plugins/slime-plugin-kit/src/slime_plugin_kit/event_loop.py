"""Event loops of tests: a scene that must end, and a loop in a thread for what outlives a test."""

from __future__ import annotations

import asyncio
import threading
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


class BackgroundLoop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 600.0) -> T:
        """What the coroutine returns; TimeoutError if it takes longer."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
