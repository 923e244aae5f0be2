"""Memory in use, of the GPUs of this machine and of this process with those that it started."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

HOST: Final = "host"
QUERY: Final = ("--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits")
MIB: Final = 2**20
WAIT_S: Final = 10
STAT_RSS: Final = 1
"""Place of the pages in memory in /proc/PID/statm."""


def memory_in_use() -> dict[str, tuple[int, int]]:
    """Bytes in use and bytes that there are, by `host` (of the run's processes on this machine) and `GPU N`. Without /proc or
    nvidia-smi, what it would show is not there."""
    found = {} if (host := host_memory()) is None else {HOST: host}
    return found | gpu_memory()


def host_memory() -> tuple[int, int] | None:
    proc = Path("/proc/self")
    if not proc.exists():
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    used = sum(resident_pages(pid) for pid in descendants(os.getpid())) * page
    return used, os.sysconf("SC_PHYS_PAGES") * page


def descendants(pid: int) -> Iterator[int]:
    """A process, those that it started, and theirs."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:
            # The thread has ended.
            continue
        for child in children:
            yield from descendants(int(child))


def resident_pages(pid: int) -> int:
    """0 of a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[STAT_RSS])
    except (OSError, IndexError):
        return 0


def gpu_memory() -> dict[str, tuple[int, int]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        text = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
        rows = [[int(cell) for cell in line.split(",")] for line in text.splitlines()]
        return {f"GPU {number}": (used * MIB, total * MIB) for number, used, total in rows}
    except (subprocess.SubprocessError, OSError, ValueError):
        # Its driver is not there, or a GPU does not report its memory.
        return {}
