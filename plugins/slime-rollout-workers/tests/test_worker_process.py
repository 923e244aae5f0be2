"""A worker that was killed, while a child of it lives and holds whatever it has inherited."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from slime_rollout_workers import worker_process
from slime_rollout_workers.channel import READ_AHEAD, Channel
from slime_rollout_workers.worker_process import WorkerProcess

PATIENCE_S = 30.0
KILLED = """
import os, signal
from slime_rollout_workers.channel import send_at_once

child = os.fork()
if not child:
    signal.pause()
send_at_once(end, child)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""As the kernel kills a process that has too much memory: it sends nothing any more."""


@pytest.fixture
async def messages(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    for name in ("EXIT_CHECK_S", "GRACE_S", "DEATH_S"):
        monkeypatch.setattr(worker_process, name, 0.05)
    return asyncio.Queue()


async def killed_worker(messages: asyncio.Queue[int]) -> WorkerProcess:
    (here, there), (reports_here, reports_there) = socket.socketpair(), socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(KILLED, {"end": there}))
    with there, reports_there:
        process.start()
    setup: Any = SimpleNamespace(name="rollout worker 0", timeout=300.0)
    channels = await Channel.over(here), await Channel.over(reports_here)
    return WorkerProcess(setup, process, channels, messages.put_nowait, lambda seconds, where: None)


async def test_its_death_is_noticed_and_its_end_waits_for_no_one(messages: asyncio.Queue[int]) -> None:
    worker = await killed_worker(messages)
    child = await asyncio.wait_for(messages.get(), PATIENCE_S)
    try:
        await asyncio.wait_for(asyncio.wait({worker.reading}), PATIENCE_S)
        # More than the socket takes.
        worker.send(b"x" * (3 * READ_AHEAD))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(worker.end(), PATIENCE_S) == f"died (exit code {-signal.SIGKILL})"
        assert worker.error is None
        assert os.path.exists(f"/proc/{child}")
    finally:
        os.kill(child, signal.SIGKILL)


async def test_it_can_be_stopped(messages: asyncio.Queue[int]) -> None:
    worker = await killed_worker(messages)
    child = await asyncio.wait_for(messages.get(), PATIENCE_S)
    try:
        worker.send(b"x" * (3 * READ_AHEAD))
        await asyncio.wait_for(worker.stop(), PATIENCE_S)
        assert worker.reading.done()
    finally:
        os.kill(child, signal.SIGKILL)
