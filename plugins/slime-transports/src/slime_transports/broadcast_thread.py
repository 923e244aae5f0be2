"""BroadcastThread: runs calls one after the other in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from slime_core.registry.boundary import held


class BroadcastThread:
    """One thread, so that broadcasts stay in order. It blocks if an engine is late or dead, and is then abandoned; the end of
    the process would wait for a thread of a ThreadPoolExecutor."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="weights-broadcast", daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        ended: Future[Any] = Future()

        def call() -> None:
            with held() as failed:
                ended.set_result(function(*arguments))
            if failed.error is not None:
                # Raised by the caller that waits for the future.
                ended.set_exception(failed.error)

        self._calls.put(call)
        return ended

    def close(self) -> None:
        """Ends the thread after the calls that were submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
