"""Kills process groups and waits for their end.

A server's main process starts others: a scheduler per device, kernel compilers. They share its process group, but end
later than it: a scheduler holds the memory of its device and its ports for a while after the main process has exited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import Final

import psutil

POLL_S: Final = 0.02


def kill_process_group(leader: int, limit_s: float) -> list[psutil.Process]:
    """Sends SIGKILL to the process group `leader` (a pid) and to descendants that have left the group. Returns [] when all
    have ended, or after `limit_s` seconds those that still run."""
    deadline = time.monotonic() + limit_s
    known: set[psutil.Process] = set()
    while True:
        # Before the signal: processes that left the group are found through their parents, as long as these live.
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


def processes_of(leader: int) -> set[psutil.Process]:
    """The members of the group and all their descendants."""
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
    """The process group of `pid`; None if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended. A zombie has freed its resources, and stays for ever if its parent does not wait for
    it. But a process already shows as a zombie when its first thread has ended and others still run."""
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return True
