"""`slime serve` as a process of its own, and programs of clients in the environment that has the SDK."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Final

from slime_plugin_kit.served_process import ServedProcess

ROOT: Final = Path(__file__).parents[3]
CLIENT_PYTHON: Final = ROOT / ".venv-tinker/bin/python"
CLIENTS: Final = Path(__file__).parent / "client"
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


def served_process(folder: Path, model: Path, *options: str) -> ServedProcess:
    """`options`: of the command, in addition."""
    text = WHOLE_RUN_FILE if "--full-parameters" in options else RUN_FILE
    return ServedProcess(folder, text.format(model=model), *options)


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
