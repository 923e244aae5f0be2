"""A job's folder: whether it holds too much, and its end. Standard library alone, and no neighbours: the run imports it too."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from typing import Final

LOOK_S: Final = 0.1
PACE: Final = 2
"""Between looks passes this many times what the last one took."""

# How `watch` ends.
BYTES, ENTRIES, HIDDEN = 1, 2, 3


def watch(folder: str, most_bytes: int, most_entries: int) -> int:
    """Looks at a folder that is being written to until it holds too much, or the process that asked is gone (0)."""
    asked_by = os.getppid()
    while os.getppid() == asked_by:
        begun = time.monotonic()
        if found := excess(folder, most_bytes, most_entries):
            return found
        time.sleep(max(LOOK_S, PACE * (time.monotonic() - begun)))
    return 0


def excess(folder: str, most_bytes: int, most_entries: int) -> int:
    """What it has too much of: `BYTES` of files on disk, `ENTRIES` (files and folders), or what cannot be counted, `HIDDEN`.
    0 if nothing. Stops as soon as it knows."""
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
            # Locked, or so deep that no path leads there.
            return HIDDEN
    return 0


def remove(folder: str) -> None:
    """However deep it is, and also what its owner has locked: a folder with something in it is moved up before its turn comes,
    so that no path grows. Of a folder that nobody writes to any more; else OSError, and it can be tried again."""
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
                # Who moves a folder to another needs its permissions.
                os.chmod(entry.path, stat.S_IRWXU)
                rest.append(f"{moved}.{next(numbers)}")
                os.rename(entry.path, rest[-1])
        if path != folder:
            os.rmdir(path)
    os.rmdir(folder)


def is_removed(folder: str) -> bool:
    """Tries what is enough for an empty folder."""
    try:
        os.rmdir(folder)
    except OSError:
        return False
    return True
