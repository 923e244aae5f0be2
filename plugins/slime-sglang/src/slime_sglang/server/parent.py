"""The end of the parent is the end of its servers."""

from __future__ import annotations

import os
import signal
import sys
import threading


def die_with_parent() -> None:
    """Ends the process group when stdin does: the parent holds its other end, and no process holds it longer."""

    def wait() -> None:
        # Not through sys.stdin: whoever waits in it holds its lock, and the interpreter's own end would be a crash.
        while os.read(descriptor, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    descriptor = sys.stdin.fileno()
    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
