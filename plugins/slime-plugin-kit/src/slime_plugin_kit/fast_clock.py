"""Scenes on a clock that does not wait: whenever nothing is to be done, it jumps to the next thing that is."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, TypeVarTuple

from slime_core.registry.boundary import held

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
PATIENCE_S: Final = 20_000.0


class FastClock(asyncio.SelectorEventLoop):
    """An event loop whose hours take no time. Threads and processes cannot be waited for in it; what is given to a thread is
    done at once."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds; adding to it is what an outage of this process looks like."""
        super().__init__(JumpingSelector(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        with held() as failed:
            done.set_result(func(*args))
        if failed.error is not None:
            # Raised where it is awaited, as with a thread.
            done.set_exception(failed.error)
        return done


class JumpingSelector(selectors.DefaultSelector):
    def __init__(self, clock: FastClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everybody waits, and nothing is going to happen any more")
        if not ready and timeout is not None and timeout > 0:
            self._clock.now += timeout
        return ready


def run_fast(scene: Coroutine[Any, Any, T], patience_s: float = PATIENCE_S) -> T:
    """What the scene returns; AssertionError as soon as it can never end, or if it takes longer on its own clock."""

    async def soon() -> T:
        try:
            async with asyncio.timeout(patience_s):
                return await scene
        except TimeoutError:
            raise AssertionError(f"it has not ended within {patience_s:g} s of its own clock") from None

    with asyncio.Runner(loop_factory=FastClock) as runner:
        return runner.run(soon())
