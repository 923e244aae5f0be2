"""A job's folder: checks its size, and removes it. Imports only the standard library: the run imports this module too."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from typing import Final

LOOK_S: Final = 0.1
PACE: Final = 2
"""The pause between checks is at least this many times as long as the last check."""

# How `watch` ends.
BYTES, ENTRIES, HIDDEN = 1, 2, 3


def watch(folder: str, most_bytes: int, most_entries: int) -> int:
    """Checks a folder until it exceeds a limit, which is returned, or until the parent process has ended (0)."""
    asked_by = os.getppid()
    while os.getppid() == asked_by:
        begun = time.monotonic()
        if found := excess(folder, most_bytes, most_entries):
            return found
        time.sleep(max(LOOK_S, PACE * (time.monotonic() - begun)))
    return 0


def excess(folder: str, most_bytes: int, most_entries: int) -> int:
    """The limit that the folder exceeds: `BYTES` of files on disk, `ENTRIES` (files and folders), or `HIDDEN` if a part of it
    cannot be read. 0 if none. Stops at the first one found."""
    num_bytes = num_entries = 0
    rest = [folder]
    while rest:
        try:
            with os.scandir(rest.pop()) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries > most_entries:
                        return ENTRIES
                    if entry.is_dir(follow_symlinks=False):
                        rest.append(entry.path)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if num_bytes > most_bytes:
                        return BYTES
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            # Locked, or too deep for a path.
            return HIDDEN
    return 0


def remove(folder: str) -> None:
    """Removes a folder of any depth, also what its owner has locked. Non-empty folders are moved up first, so no path becomes
    too long. OSError if a process still writes to the folder; the call can then be repeated."""
    moved = os.path.join(folder, os.urandom(8).hex())
    numbers = itertools.count()
    rest = [folder]
    while rest:
        path = rest.pop()
        os.chmod(path, stat.S_IRWXU)
        with os.scandir(path) as entries:
            inside = list(entries)
        for entry in inside:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif not is_removed(entry.path):
                # Moving a folder requires its permissions.
                os.chmod(entry.path, stat.S_IRWXU)
                rest.append(f"{moved}.{next(numbers)}")
                os.rename(entry.path, rest[-1])
        if path != folder:
            os.rmdir(path)
    os.rmdir(folder)


def is_removed(folder: str) -> bool:
    """Removes a folder if it is empty, and returns whether it did."""
    try:
        os.rmdir(folder)
    except OSError:
        return False
    return True
