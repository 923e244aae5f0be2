"""ServedProcess: `slime serve` as a process of its own, for tests of slime-tinker and of engines behind it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

START_S: Final = 240


class ServedProcess:
    def __init__(self, folder: Path, run_file: str, *options: str) -> None:
        """`run_file`: its text. `options`: of the command, in addition."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").write_text(run_file)
        self._folder = folder
        self._options = options
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        scheme = "https" if "--tls-key" in self._options else "http"
        return f"{scheme}://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Returns when it serves; a second time on the same port."""
        command = [
            str(Path(sys.executable).with_name("slime")),
            "serve",
            "run.toml",
            "--port",
            str(self._port),
            *self._options,
        ]
        errors = (self._folder / "errors.txt").open("a")
        self._process = subprocess.Popen(
            command, cwd=self._folder, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        line = ""
        while " at http" not in line:
            ready, _, _ = select.select([self._process.stdout], [], [], START_S)
            assert ready, "the server did not start"
            line = self._process.stdout.readline()
            assert line, (self._folder / "errors.txt").read_text()
        self._port = int(line.split(",")[0].rpartition(":")[2])

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
        return self._process.wait(timeout=60)
