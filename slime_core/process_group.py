"""Processes that were told to end, and what they still hold."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

POLL_S: Final = 0.02


async def group_gone(leader: int, limit_s: float) -> bool:
    """Waits until no process of this machine is in the group that `leader` (a pid) began, at most `limit_s` seconds; whether
    there is none. A process holds the memory of its devices for a while after it was killed, and its children may for
    longer."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while has_processes(leader):
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


def has_processes(group: int) -> bool:
    """Zombies do not count: they hold nothing, and where nobody collects them they stay."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # Of somebody else, so the number was given anew.
        return False
    return any(in_group(stat, group) for stat in Path("/proc").glob("[0-9]*/stat"))


def in_group(stat: Path, group: int) -> bool:
    try:
        # The name, in parentheses, may hold anything.
        state, _, of, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(of) == group and state not in ("Z", "X")
