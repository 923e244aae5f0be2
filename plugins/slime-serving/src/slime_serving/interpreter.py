"""The interpreter that starts an engine's servers: it may be another than the run's, with other versions of common libraries.

Imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Final

LOOK: Final = """
import importlib.metadata as metadata, importlib.util, json, sys
package, *names = sys.argv[1:]
spec = importlib.util.find_spec(package)
found = [name for name in names if spec is not None for _ in metadata.distributions(name=name)]
print(json.dumps({
    "folder": None if spec is None else next(iter(spec.submodule_search_locations)),
    "version": metadata.version(found[0]) if found else None,
}))
"""
LOOK_AT_TORCH: Final = """
import json, torch
gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""
UNKNOWN: Final = "of an unknown version"
TIMEOUT_S: Final = 60.0
TORCH_S: Final = 180.0
"""Time limit of importing torch and looking for devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that serves a model."""

    name: str
    """Such as vLLM."""
    package: str
    distributions: tuple[str, ...]
    """Names under which it may be installed."""
    tested: tuple[str, ...]
    """Versions that the plugin was tested with."""
    install: str
    """How to install it, as a sentence."""


class StartsProgram:
    """Beside EngineDriver: the engine's servers are started by the interpreter `config.python`; None: the run's own."""

    program: ClassVar[Program]


@dataclass(frozen=True, slots=True)
class Installed:
    folder: Path
    """The package."""
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevices:
    version: str
    cuda: str | None
    """The CUDA version that torch is built for; None: for CPUs."""
    gpus: tuple[str, ...]


@cache
def program_in(python: str | None, program: Program) -> Installed | str:
    """The program of an interpreter (None: this one), without importing it. A string: why there is none, as a sentence."""
    if python is None:
        spec = importlib.util.find_spec(program.package)
        versions = [dist.version for name in program.distributions for dist in metadata.distributions(name=name)]
        places = None if spec is None else spec.submodule_search_locations
        if not places:
            return f"{program.name} is not installed here ({sys.executable})."
        return Installed(Path(next(iter(places))), versions[0] if versions else UNKNOWN)
    found = asked(python, LOOK, program.package, *program.distributions, timeout_s=TIMEOUT_S)
    if isinstance(found, str):
        return found
    if found["folder"] is None:
        return f"{python}: {program.name} is not installed there."
    return Installed(Path(found["folder"]), str(found["version"] or UNKNOWN))


def torch_in(python: str | None) -> TorchDevices | str:
    """The torch of an interpreter, which it imports, and the GPUs that it sees. A string: why there is none, as a sentence."""
    found = asked(python, LOOK_AT_TORCH, timeout_s=TORCH_S)
    if isinstance(found, str):
        return found
    return TorchDevices(version=found["torch"], cuda=found["cuda"], gpus=tuple(found["gpus"]))


def linked_packages(*names: str) -> tempfile.TemporaryDirectory[str]:
    """A folder with links to these packages of this interpreter, for the module search path of another one: their own folder
    may have others beside them."""
    folder = tempfile.TemporaryDirectory(prefix="slime-packages-")
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        Path(folder.name, name).symlink_to(next(iter(spec.submodule_search_locations or ())))
    return folder


def asked(python: str | None, code: str, *arguments: str, timeout_s: float) -> Any:
    """What the code prints as JSON in its last line; a string: why it does not, as a sentence."""
    command = python or sys.executable
    try:
        ended = subprocess.run(
            [command, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command}: cannot be run: {error}."
    if ended.returncode:
        return f"{command}: it ended with exit code {ended.returncode}: {ended.stderr.strip()[-300:]}"
    return json.loads(ended.stdout.splitlines()[-1])
