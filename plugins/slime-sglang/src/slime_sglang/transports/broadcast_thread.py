"""BroadcastThread: calls one after the other, beside whoever asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class BroadcastThread:
    """One thread: broadcasts stay in order. It blocks where an engine is late or dead, and then is left behind; a thread of
    ThreadPoolExecutor's would be waited for when the process ends."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="weights-broadcast", daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        ended: Future[Any] = Future()

        def call() -> None:
            try:
                result = function(*arguments)
            except Exception as error:  # noqa: BLE001 - whoever waits for it raises it
                ended.set_exception(error)
            else:
                ended.set_result(result)

        self._calls.put(call)
        return ended

    def close(self) -> None:
        """The thread ends behind what it has been given, if that ends."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
