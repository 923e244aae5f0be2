"""WorkerProcess: the process of a rollout worker, and the channel to it."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from typing import Any, Final

from slime_core.registry.boundary import held
from slime_core.rollout.reward_process import interrupts_blocked
from slime_rollout_workers.channel import Channel
from slime_rollout_workers.hang_watch import HangWatch
from slime_rollout_workers.messages import Close, WorkerSetup
from slime_rollout_workers.worker import serve

NAME: Final = "slime-rollout-worker"
STOP_S: Final = 10.0
"""Seconds that a worker gets to close its generators and end."""
DEATH_S: Final = 2.0
"""Seconds between the end of the channel and that of the process, after which it is killed."""
EXIT_CHECK_S: Final = 1.0
"""Seconds between two looks whether the process lives."""
GRACE_S: Final = 0.5
"""Seconds to read what a process that has died had sent."""


class WorkerProcess:
    def __init__(
        self,
        setup: WorkerSetup,
        process: SpawnProcess,
        channels: tuple[Channel, Channel],
        take: Callable[[Any], None],
        on_blocked: Callable[[float, str], None],
    ) -> None:
        self._process = process
        self._channels = channels
        channel, reports = channels
        self.reading = asyncio.create_task(channel.read(take))
        """Done when the process is gone, or was killed because it hung; raises what `take` raised."""
        self.send = channel.send
        self.watch = HangWatch(setup.name, setup.timeout, on_hang=self._kill_hung, on_blocked=on_blocked)
        self._report_reading = asyncio.create_task(reports.read(self.watch.take))
        self._exit_watch = asyncio.create_task(self._watch_exit())
        self._hang: str | None = None
        """Why it was killed."""

    @classmethod
    async def start(
        cls, setup: WorkerSetup, take: Callable[[Any], None], on_blocked: Callable[[float, str], None]
    ) -> WorkerProcess:
        """`take` is called with each message; `on_blocked`: see `HangWatch`."""
        (here, there), (reports_here, reports_there) = socket.socketpair(), socket.socketpair()
        # Forking a process that has torch's threads can deadlock.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=serve, args=(there, reports_there, setup), name=f"{NAME}-{setup.number}")
        with there, reports_there, interrupts_blocked():
            process.start()
        try:
            channels = await Channel.over(here), await Channel.over(reports_here)
        except BaseException:
            process.kill()
            raise
        return cls(setup, process, channels, take, on_blocked)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def error(self) -> Exception | None:
        """What the driver raised at a message, where `reading` is done."""
        if self.reading.cancelled():
            return None
        with held() as failed:
            self.reading.result()
        return failed.error

    async def _watch_exit(self) -> None:
        """Ends the reading of a process that has died, though its children hold the other end of the channel. They may hold the
        pipe of its sentinel too."""
        while not self.reading.done():
            await asyncio.wait({self.reading}, timeout=EXIT_CHECK_S)
            if self._process.exitcode is not None:
                await asyncio.wait({self.reading}, timeout=GRACE_S)
                self.reading.cancel()

    def _kill_hung(self, why: str) -> None:
        self._hang = why
        # One that is stopped ends too. Its children may hold the other end of the channel.
        self._process.kill()
        self.reading.cancel()

    async def end(self) -> str:
        """What happened to a process whose `reading` is done, as the end of a sentence. It is killed if it still runs."""
        code = await self._end()
        return f"died (exit code {code})" if self._hang is None else f"was killed: {self._hang}"

    async def stop(self) -> None:
        self.send(Close())
        await asyncio.wait({self.reading}, timeout=STOP_S)
        await self._end()

    async def _end(self) -> int | None:
        # Two that wait for a process at the same time may both miss its exit code.
        self._exit_watch.cancel()
        await asyncio.to_thread(self._process.join, DEATH_S)
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        self.watch.close()
        reading = {self.reading, self._report_reading}
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)
        for channel in self._channels:
            await channel.abort()
        return self._process.exitcode
