"""FolderLock: one process at a time works in a folder. The lock file names the process that holds it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from slime_core.controller.run_folder import RunFolder
from slime_core.errors import ConfigError, StorageError


def lock_folder(folder: RunFolder) -> IO[str]:
    """Locks the run folder as long as the returned file is open; the system releases the lock when the process ends."""
    return lock(
        folder.path,
        busy="this run is running in another process. Wait for it, or give this one a --name.",
        elsewhere="Pass --runs-dir for another place.",
    )


def lock(folder: Path, *, busy: str, elsewhere: str) -> IO[str]:
    """Locks any folder. `busy`: the error if another process holds the lock; `elsewhere`: the fix if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not "w", which would erase the holder's line before the lock is ours.
        handle = (folder / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            handle.truncate(0)
            since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
            json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": since}, handle)
            handle.flush()
        except BlockingIOError:
            with handle:
                raise ConfigError(f"{folder}: {busy} {holder_text(handle, folder / '.lock')}".rstrip()) from None
        except OSError:
            handle.close()
            raise
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written or locked: {error}. {elsewhere}") from error
    return handle


def holder_text(handle: IO[str], path: Path) -> str:
    """Which process holds the lock; empty if it has not written that yet."""
    handle.seek(0)
    try:
        holder = json.loads(handle.read())
        host, pid, since = str(holder["host"]), int(holder["pid"]), str(holder["since"])
    except (ValueError, TypeError, KeyError):
        return ""
    if host == socket.gethostname() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
        return (
            f"The process that began it (pid {pid} on {host}, since {since}) has ended, and left one behind that still uses "
            f"the folder: end the one that `fuser {path}` shows."
        )
    return f"The other process: pid {pid} on {host}, since {since}."
