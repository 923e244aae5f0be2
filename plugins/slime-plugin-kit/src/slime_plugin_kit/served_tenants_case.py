"""`slime serve` as a process over a running server of an engine, and two tenants' programs of the Tinker SDK."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from slime_plugin_kit.served_process import ServedProcess

RUN_FILE: Final = """\
name = "served"
backend = {{ name = "fsdp", max_adapters = 2 }}

[model]
hf_checkpoint = "{model}"

[engine]
"""
PROGRAM_S: Final = 240


def require_tenants_are_served(folder: Path, model: Path, engine: Mapping[str, Any], *, unembed: bool) -> None:
    """See `two_tenants`. engine: its table in the run file, with `max_adapters` of 3 or more. unembed: adapters of the output
    layer too."""
    keys = [new_key(folder, name) for name in ("first", "second")]
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in engine.items())
    server = ServedProcess(folder, RUN_FILE.format(model=model) + table, "--keys", "keys.json")
    server.start()
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"}
        words = ["-m", "slime_plugin_kit.two_tenants", server.address, *keys, str(unembed)]
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=PROGRAM_S, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
        assert done.stdout.endswith("done\n")
        print(done.stdout)
        assert server.stop() == 0, (folder / "errors.txt").read_text()
    finally:
        server.kill()


def new_key(folder: Path, tenant: str) -> str:
    """As a user makes one."""
    command = [str(Path(sys.executable).with_name("slime")), "serve", "keys", "add", tenant, "--keys", "keys.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(word for word in done.stdout.split() if word.startswith("tml-"))
