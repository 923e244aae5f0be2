"""Ends a server when its parent process ends."""

from __future__ import annotations

import os
import signal
import sys
import threading


def die_with_parent() -> None:
    """Ends the process group when stdin does: the parent holds its other end, and no process holds it longer."""

    def wait() -> None:
        # Not through sys.stdin: a thread that waits in it holds its lock, and the interpreter would crash at its end.
        while os.read(descriptor, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    descriptor = sys.stdin.fileno()
    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
