"""`slime run --help`: the command's own options and every flag, those of the chosen plugins too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slime_core.cli.invocation import plugin_files
from slime_core.config.chosen import chosen_flags
from slime_core.config.flags import Flag, FlagTable, kernel_flags
from slime_core.config.load import merge, read_run_file
from slime_core.registry import Registry
from slime_core.registry.options import type_text

OWN = (
    ("--dry-run", "Resolve and check everything; start nothing but [prepare]."),
    ("--fresh", "Remove the run's folder and start over."),
    ("--resume FOLDER", "Continue in this run folder."),
    (
        "--accept-changes plugins",
        "Continue an unfinished run with other versions of its plugins. Recorded in manifest.json.",
    ),
    ("--replay-schedule FILE", "Repeat an asynchronous run to the bit: runs/NAME/schedule.jsonl."),
    ("--ckpt-step N", "Continue from the checkpoint of step N, not from the newest."),
    ("--set KEY=VALUE", "Set any key by its dotted path."),
    ("--quiet", "Print errors only."),
    ("--debug", "Show tracebacks."),
)

LISTS: Final = (
    "Flags win over the run file, and the last value of a flag wins. A flag that takes a list takes several words, and may be "
    "repeated: the words follow each other. They replace the run file's list; those of --plugin come after it."
)


def print_run_help(words: Sequence[str]) -> None:
    """With a run file among the words, the flags of its plugins are listed too."""
    console = Console(highlight=False)
    console.print("usage: slime run run.toml \\[--flag value ...]\n")
    table = Table.grid(padding=(0, 2))
    for flag, text in OWN:
        table.add_row(flag, text)
    console.print(table)
    console.print(f"\n{LISTS}")
    flags = kernel_flags()
    rest = [word for word in words if word != "--help"]
    files = [word for word in rest if word.endswith(".toml")]
    if files:
        path = Path(files[0])
        others = [word for word in rest if word != files[0]]
        named = merge(read_run_file(path), FlagTable.of(flags).parse(others, lenient=True))
        flags += chosen_flags(named, Registry.from_environment(plugin_files(named, path.parent)))
    owners: dict[str, list[Flag]] = {}
    for flag_ in flags:
        owners.setdefault(flag_.path[0] if len(flag_.path) > 1 else "run", []).append(flag_)
    for owner, owned in owners.items():
        console.print(f"\n[bold]{owner}[/]")
        for flag_ in owned:
            # On a line of its own, whole: names are copied and looked for, and some take most of a terminal's width.
            console.print(Text(f"--{flag_.name}  {type_text(flag_.field)}"), soft_wrap=True)
            if doc := " ".join((flag_.field.description or "").split()):
                console.print(Padding(Text(doc), (0, 0, 0, 6)))
    if not files:
        console.print("\nName a run file to see the flags of its plugins too: slime run run.toml --help")
