"""What `slime compat trl` does."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from slime_compat.notes import Note, exit_code, report
from slime_compat.run_document import run_file
from slime_compat.trl.defaults import DEFAULTS
from slime_compat.trl.rules.order import apply
from slime_compat.trl.script import read
from slime_compat.trl.translation import TrlTranslation
from slime_compat.trl.unused import UNUSED

READ_ARGUMENTS: Final = frozenset(
    {"model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "peft_config"}
)
"""Arguments of GRPOTrainer that rules read, or that slime does not need."""


def translate(words: Sequence[str], *, backend: str, engine: str, num_processes: int | None, lenient: bool) -> int:
    """Prints the run file, and the notes on stderr. Returns the exit code."""
    translation = translated(Path(words[0]), words[1:], backend=backend, engine=engine, num_processes=num_processes)
    print(run_file(translation.tables, words[0]), end="")
    report(translation.notes)
    return exit_code(translation.notes, lenient=lenient)


def translated(
    path: Path,
    flags: Sequence[str] = (),
    *,
    backend: str = "fsdp",
    engine: str = "sglang",
    num_processes: int | None = None,
) -> TrlTranslation:
    """The translation of a script. flags: of its command line, for scripts with TrlParser."""
    notes: list[Note] = []

    def note(flag: str, text: str, *, trains: bool = False) -> None:
        notes.append(Note(flag, text, trains))

    script = read(path, flags, note)
    translation = TrlTranslation(
        given=script.keywords,
        defaults=DEFAULTS,
        backend=backend,
        engine=engine,
        notes=notes,
        script=script,
        num_processes=num_processes or 1,
        knows_processes=num_processes is not None,
    )
    for unread in script.unread:
        translation.note(
            unread.keyword,
            f"line {unread.line}: {unread.source}: no literal; TRL's default is used, set the key in the run file",
            trains=True,
        )
    apply(translation)
    translation.unused(UNUSED)
    for name in sorted(script.trainer.keys() - READ_ARGUMENTS):
        source = ast.unparse(script.trainer[name])
        translation.note(
            f"GRPOTrainer({name}=...)", f"line {script.trainer[name].lineno}: {source}: left out", trains=True
        )
    return translation
