"""WorkerProcess: the process of a rollout worker, and the channel to it."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from typing import Any, Final

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
        """Done when the process is gone, or was killed because it hung."""
        self.send = channel.send
        self.watch = HangWatch(setup.name, setup.timeout, on_hang=self._kill_hung, on_blocked=on_blocked)
        self._report_reading = asyncio.create_task(reports.read(self.watch.take))
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

    def _kill_hung(self, why: str) -> None:
        self._hang = why
        # One that is stopped ends too. Its children may hold the other end of the channel.
        self._process.kill()
        self.reading.cancel()

    async def end(self) -> str:
        """What happened to a process whose `reading` is done, as the end of a sentence. It is killed if it still runs."""
        await asyncio.to_thread(self._process.join, DEATH_S)
        code = await self._end()
        return f"died (exit code {code})" if self._hang is None else f"was killed: {self._hang}"

    async def stop(self) -> None:
        self.send(Close())
        await asyncio.wait({self.reading}, timeout=STOP_S)
        await asyncio.to_thread(self._process.join, DEATH_S)
        await self._end()

    async def _end(self) -> int | None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        self.watch.close()
        self.reading.cancel()
        self._report_reading.cancel()
        await asyncio.wait({self.reading, self._report_reading})
        for channel in self._channels:
            await channel.close()
        return self._process.exitcode
