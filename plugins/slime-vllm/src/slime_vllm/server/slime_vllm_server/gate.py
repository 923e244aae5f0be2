"""The gate of a server that is started early: while its processes import their modules, trainers still use the devices."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

GATE: Final = "gate="
"""Beginning of an argument of the server, which all its processes have, with the file that opens the gate."""
LOOK_S: Final = 0.05


def wait_at_gate() -> None:
    for gate in (Path(word.removeprefix(GATE)) for word in sys.argv[1:] if word.startswith(GATE)):
        while not gate.exists():
            time.sleep(LOOK_S)
