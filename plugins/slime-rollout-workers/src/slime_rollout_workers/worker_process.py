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
from slime_rollout_workers.messages import Close, WorkerSetup
from slime_rollout_workers.worker import serve

NAME: Final = "slime-rollout-worker"
STOP_S: Final = 10.0
"""Seconds that a worker gets to close its generators and end."""
DEATH_S: Final = 2.0
"""Seconds between the end of the channel and that of the process, after which it is killed."""


class WorkerProcess:
    def __init__(self, process: SpawnProcess, channel: Channel, reading: asyncio.Task[None]) -> None:
        self._process = process
        self._channel = channel
        self.reading = reading
        """Done when the process is gone."""
        self.send = channel.send

    @classmethod
    async def start(cls, setup: WorkerSetup, take: Callable[[Any], None]) -> WorkerProcess:
        """`take` is called with each message."""
        here, there = socket.socketpair()
        # Forking a process that has torch's threads can deadlock.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=serve, args=(there, setup), name=f"{NAME}-{setup.number}")
        with there, interrupts_blocked():
            process.start()
        try:
            channel = await Channel.over(here)
        except BaseException:
            process.kill()
            raise
        return cls(process, channel, asyncio.create_task(channel.read(take)))

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def exit_code(self) -> int | None:
        """Of a process whose channel has ended; it is killed if it still runs."""
        await asyncio.to_thread(self._process.join, DEATH_S)
        return await self._end()

    async def stop(self) -> None:
        self._channel.send(Close())
        await asyncio.wait({self.reading}, timeout=STOP_S)
        await asyncio.to_thread(self._process.join, DEATH_S)
        await self._end()

    async def _end(self) -> int | None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        self.reading.cancel()
        await asyncio.wait({self.reading})
        await self._channel.close()
        return self._process.exitcode
