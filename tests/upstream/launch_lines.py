"""Every launch line of a checkout of upstream slime: of its shell scripts, and of its Python launchers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from slime_compat.launch_line import LaunchLine, from_script
from slime_core.errors import SlimeError

CHILD: Final = Path(__file__).with_name("launcher_child.py")
STARTS: Final = re.compile(r"\btrain(_async)?\.py\b")
VARIABLES: Final = {"BASE_DIR": "/root", "BASE_FOLDER": "/root", "MASTER_ADDR": "10.0.0.1"}
"""What scripts ask for."""
TIMEOUT_S: Final = 120.0


def launch_lines(checkout: Path, folder: Path, only: Sequence[str]) -> Iterator[tuple[str, LaunchLine | SlimeError]]:
    """Yields (script, line), or the error with which a script failed. `folder`: for files that scripts write; `only`: scripts
    whose path contains one of these."""
    os.chdir(checkout)
    os.environ |= {"TMPDIR": str(folder), **VARIABLES}
    for script in sorted(Path().rglob("*.sh")):
        if is_asked(script, only) and STARTS.search(script.read_text()):
            yield str(script), read(script)
    for launcher in sorted(Path().rglob("*.py")):
        is_launcher = launcher.name != "command_utils.py" and "execute_train" in launcher.read_text()
        if is_launcher and is_asked(launcher, only):
            for n, command in enumerate(of_launcher(launcher, folder)):
                script = folder / f"{launcher.stem}-{n}.sh"
                script.write_text(command)
                yield f"{launcher}#{n}", read(script)


def is_asked(script: Path, only: Sequence[str]) -> bool:
    return any(text in str(script) for text in only)


def read(script: Path) -> LaunchLine | SlimeError:
    try:
        return from_script(script, [])
    except SlimeError as error:
        return error


def of_launcher(launcher: Path, folder: Path) -> list[str]:
    """What the launcher would run with bash to train."""
    # Kept: launch lines name files in it.
    own = tempfile.mkdtemp(dir=folder)
    out = Path(own, "lines.json")
    env = {**os.environ, "TMPDIR": own, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(
        [sys.executable, str(CHILD), str(launcher), str(out)],
        env=env,
        check=False,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    lines: list[str] = json.loads(out.read_text())
    return lines
