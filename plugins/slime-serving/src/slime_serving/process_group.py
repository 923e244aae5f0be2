"""Groups of processes, and their end.

A server's main process starts others: a scheduler for each device, what compiles kernels. They share its process group, but
each ends when its own memory is given back: a scheduler holds that of its device, and its ports, for a while after the main
process has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import Final

import psutil

POLL_S: Final = 0.02


def end_group(leader: int, limit_s: float) -> list[psutil.Process]:
    """SIGKILL to the process group `leader` and to all that was started by it and has left it. Returns when none of them runs
    any more; after `limit_s` seconds with those that do."""
    deadline = time.monotonic() + limit_s
    known: set[psutil.Process] = set()
    while True:
        # Before the signal: whoever has left the group is found by its parents, while these live.
        known |= processes_of(leader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        left = [process for process in known if not has_ended(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if not left or time.monotonic() > deadline:
            return sorted(left, key=lambda process: process.pid)
        time.sleep(POLL_S)


async def group_gone(leader: int, limit_s: float) -> bool:
    """Waits until nothing of the process group `leader` (a pid) runs on this machine, at most `limit_s` seconds; whether
    nothing does."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while not all(has_ended(process) for process in processes_of(leader)):
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


def processes_of(leader: int) -> set[psutil.Process]:
    """The members of the group, and all that descends from them."""
    everyone = {process.pid: process for process in psutil.process_iter(["ppid"])}
    children: dict[int, list[int]] = {}
    for pid, process in everyone.items():
        children.setdefault(process.info["ppid"], []).append(pid)
    found: set[int] = set()
    new: Iterable[int] = [pid for pid in everyone if group_of(pid) == leader]
    while new := set(new) - found:
        found |= new
        new = [child for pid in new for child in children.get(pid, [])]
    return {everyone[pid] for pid in found}


def group_of(pid: int) -> int | None:
    """None: it is gone."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def has_ended(process: psutil.Process) -> bool:
    """A zombie has given everything back, and may wait for ever for a parent that does not ask; but the first thread of a
    process is one already while others of its threads still end."""
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return True
