"""What `slime compat` does with a launch line of upstream slime, and its older name `slime-compat translate`."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_compat.launch_line import ENTRIES, LaunchLine, from_script, from_words
from slime_compat.notes import exit_code, report
from slime_compat.rules.order import apply
from slime_compat.run_document import run_file
from slime_compat.translation import Translation
from slime_core.errors import ConfigError


def main() -> None:
    """The console script slime-compat."""
    from slime_core.cli.main import main as slime

    words = sys.argv[1:]
    print("slime-compat translate is now slime compat; the old name works until 0.4.", file=sys.stderr)
    sys.argv[:] = ["slime", "compat", *words[words[:1] == ["translate"] :]]
    slime()


def translate(words: Sequence[str], *, backend: str | None, engine: str, lenient: bool) -> int:
    """Prints the run file, and the notes on stderr. Returns the exit code."""
    line, source = launch_line(words)
    translation = translated(line, backend=backend, engine=engine)
    print(run_file(translation.tables, source), end="")
    report(translation.notes)
    return exit_code(translation.notes, lenient=lenient)


def translated(line: LaunchLine, *, backend: str | None = None, engine: str = "sglang") -> Translation:
    """The translation of a launch line. `backend`, `engine`: in place of the line's."""
    seed = "".join(value_of(line.words, "--backend")[-1:])
    chosen = backend or "".join(value_of(line.words, "--train-backend")[-1:]) or seed or "megatron"
    translation = Translation(line, chosen, engine)
    translation.done |= {"train-backend", "backend"}
    apply(translation)
    return translation


def launch_line(words: Sequence[str]) -> tuple[LaunchLine, str]:
    """The launch line, and its source in short: the words, or the script that they name."""
    line = from_words(words)
    if line is not None:
        return line, shlex.join(["python3", line.entry, "..."])
    if len(words) > 1 and not Path(words[0]).is_file():
        raise ConfigError(
            f"{shlex.join(words)}: neither a launch script nor a line that starts {' or '.join(ENTRIES)}. Type slime "
            "compat SCRIPT [ARGUMENT ...], or slime compat -- python3 train.py ..."
        )
    return from_script(Path(words[0]), words[1:]), words[0]


def value_of(words: Sequence[str], flag: str) -> list[str]:
    """The values of a flag, one for each use."""
    behind = [following for word, following in itertools.pairwise(words) if word == flag]
    return behind + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
