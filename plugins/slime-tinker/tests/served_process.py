"""`slime serve` as a process of its own, and programs of clients in the environment that has the SDK."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
CLIENT_PYTHON: Final = ROOT / ".venv-tinker/bin/python"
CLIENTS: Final = Path(__file__).parent / "client"
START_S: Final = 240
RUN_FILE: Final = """\
name = "served"
backend = {{ name = "fsdp", max_adapters = 4 }}
engine = {{ name = "local", max_adapters = 8 }}

[model]
hf_checkpoint = "{model}"
"""
WHOLE_RUN_FILE: Final = """\
name = "served"
backend = "fsdp"
engine = "local"

[model]
hf_checkpoint = "{model}"
"""


class ServedProcess:
    def __init__(self, folder: Path, model: Path, *options: str) -> None:
        """`options`: of the command, in addition."""
        folder.mkdir(parents=True, exist_ok=True)
        text = WHOLE_RUN_FILE if "--full-parameters" in options else RUN_FILE
        (folder / "run.toml").write_text(text.format(model=model))
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
            Path(sys.executable).parent / "slime",
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


def client(
    address: str, cwd: Path, *words: str, key: str = "tml-any", authority: Path | None = None
) -> subprocess.Popen[str]:
    """A program of the folder `client`, or a module with `-m`. `authority`: certificate that it trusts, beside none."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TINKER_API_KEY": key,
        "TINKER_BASE_URL": address,
        "TINKER_TELEMETRY": "0",
    }
    if authority is not None:
        environment["SSL_CERT_FILE"] = str(authority)
    words = words if words[0] == "-m" else (str(CLIENTS / words[0]), *words[1:])
    return subprocess.Popen(
        [CLIENT_PYTHON, str(CLIENTS), *words],
        cwd=cwd,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[Any], timeout_s: float = 240) -> str:
    """What it printed. AssertionError with it if it failed."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"not through in {timeout_s} s: {output[-5000:]}") from None
    assert process.returncode == 0, output[-5000:]
    return str(output)
