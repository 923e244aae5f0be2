"""RankServer: a process that forks ranks, such as that of `ranks_script`, started once for all backends and layouts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from slime_plugin_kit import ranks_script

TIMEOUT_S: Final = 300.0


class RankServer:
    def __init__(
        self, command: Sequence[str] = (sys.executable, "-m", ranks_script.__name__), *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """`command`: of a script that calls `ranks_script.serve`."""
        self._command = command
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server

    def run(self, step: Mapping[str, Any]) -> None:
        """Runs one step in the script. AssertionError with the output of the ranks if one fails."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        # The process shares the position of this file.
        self._output.seek(0)
        self._output.truncate()
        timer = threading.Timer(self._timeout_s, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            process.stdin.write(json.dumps(step) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        finally:
            timer.cancel()
        response = json.loads(line) if line else f"their parent ended with {process.wait()}"
        if response != ranks_script.OK:
            self._output.seek(0)
            raise AssertionError(f"the ranks failed:\n{(self._output.read() + response)[-4000:]}")

    def close(self) -> None:
        self._end()
        self._output.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
                text=True,
                start_new_session=True,
            )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None
