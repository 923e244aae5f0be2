"""PlanRecording: view/plan.json, what `slime plan` counts for the run, by a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from slime_core.controller.run_folder import RunFolder
from slime_viewer.view_folder import ViewFolder

AFTER_S: Final = 900.0
"""Of a run, until its plan is counted. That took 7 s of one processor, less than a hundredth of the run then."""
PLANNER: Final = "slime_preflight"
PROGRAM: Final = "from slime_core.cli.main import main; main()"
LOWEST_PRIORITY: Final = 19
GPUS: Final = Path("/dev/nvidiactl")
"""Is there where the kernel has GPUs, also without nvidia-smi: a plan without their memory would be one for a CPU."""
FITS, DOES_NOT_FIT = 0, 1
"""Exit codes of `slime plan` with a plan."""


class PlanRecording:
    """One attempt of a run. Nothing happens in short runs, without slime-preflight, and where the config's plan is there."""

    def __init__(self, run_folder: Path, *, after_s: float = AFTER_S) -> None:
        self._config = RunFolder(run_folder).config
        self._plan = ViewFolder(run_folder).plan
        self._unfinished = self._plan.with_suffix(".part")
        self._due = time.monotonic() + after_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_done = False

    @property
    def is_counting(self) -> bool:
        return self._process is not None

    def advance(self, gpu_bytes: int | None) -> None:
        """Starts counting once it is due, and keeps what was counted. `gpu_bytes`: memory of a GPU of this machine; None: there
        is none, or it is not known: then nothing is counted. OSError if the folder cannot be written."""
        if self._process is not None:
            self._keep(self._process)
        elif not self._is_done and time.monotonic() >= self._due:
            self._is_done = True
            is_known = gpu_bytes is not None or not GPUS.exists()
            if is_known and importlib.util.find_spec(PLANNER) is not None and not self._is_there():
                self._process = self._start(gpu_bytes)

    def wait(self) -> None:
        """Until the count that is under way has ended."""
        if self._process is not None:
            self._process.wait()

    def end(self) -> None:
        """An unfinished count is given up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._unfinished.unlink(missing_ok=True)

    def _is_there(self) -> bool:
        return self._plan.exists() and self._plan.stat().st_mtime >= self._config.stat().st_mtime

    def _start(self, gpu_bytes: int | None) -> subprocess.Popen[bytes]:
        words = [
            "plan",
            str(self._config),
            "--json",
            *(() if gpu_bytes is None else ("--device-memory", f"{gpu_bytes}B")),
        ]
        self._plan.parent.mkdir(parents=True, exist_ok=True)
        with self._unfinished.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                # A context on a GPU would take memory of the run.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)
        return process

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        """Of a count that has ended."""
        if (code := process.poll()) is None:
            return
        self._process = None
        if code in (FITS, DOES_NOT_FIT) and is_json(self._unfinished):
            self._unfinished.replace(self._plan)
        else:
            # The page shows the command, which prints the reason.
            self._unfinished.unlink(missing_ok=True)


def is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True
