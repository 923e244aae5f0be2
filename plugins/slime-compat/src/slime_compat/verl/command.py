"""What `slime compat verl` does."""

from __future__ import annotations

from collections.abc import Sequence

from slime_compat.notes import exit_code, report
from slime_compat.peer import PeerTranslation
from slime_compat.run_document import run_file
from slime_compat.verl import settings
from slime_compat.verl.defaults import DEFAULTS
from slime_compat.verl.rules.order import apply
from slime_compat.verl.settings import VerlSettings
from slime_compat.verl.unused import UNUSED


def translate(words: Sequence[str], *, backend: str | None, engine: str, lenient: bool) -> int:
    """Prints the run file, and the notes on stderr. Returns the exit code."""
    read = settings.read(words)
    translation = translated(read, backend=backend, engine=engine)
    print(run_file(translation.tables, read.source), end="")
    report(translation.notes)
    return exit_code(translation.notes, lenient=lenient)


def translated(read: VerlSettings, *, backend: str | None = None, engine: str = "sglang") -> PeerTranslation:
    """The translation of what was read. backend: in place of verl's."""
    own = "megatron" if read.megatron else "fsdp"
    translation = PeerTranslation(given=read.given, defaults=DEFAULTS, backend=backend or own, engine=engine)
    if read.missing_config:
        translation.note(
            "--config-name", f"{read.missing_config}: no such file, so its keys are not in the run file", trains=True
        )
    apply(translation, megatron=read.megatron)
    translation.unused(UNUSED)
    return translation
