"""Convert a model folder: slime convert SOURCE TARGET --to NAME."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from slime_core.cli.commands import TAKES_ANY_WORDS
from slime_core.errors import ConfigError

app = typer.Typer()
USAGE = """\
usage: slime convert SOURCE TARGET --to NAME [--option value ...] [--workers N]

Converts a model folder, piece by piece, over worker processes; a conversion that was killed continues when the same command is
given again. Everything is read back and compared by checksum before TARGET is there.
`slime plugins show NAME` lists a converter's options; installed converters:"""


@app.command(context_settings=TAKES_ANY_WORDS)
def convert(context: typer.Context) -> None:
    """Converts a model folder."""
    # `main` has looked for --debug.
    words = [word for word in context.args if word != "--debug"]
    if not words or "--help" in words:
        typer.echo(f"{USAGE} {', '.join(installed()) or 'none'}")
        return
    run_command(words)


def installed() -> list[str]:
    from slime_core import groups
    from slime_core.registry import Registry

    return sorted({entry.name for entry in Registry.from_environment().entries(groups.CONVERTERS)})


def run_command(words: list[str]) -> None:
    from slime_core import groups
    from slime_core.config.flags import FlagTable, option_flags
    from slime_core.config.part import PluginSpec
    from slime_core.registry import Registry

    own, rest = taken(words, ("to", "workers"))
    places = [word for word in rest[:2] if not word.startswith("--")]
    if len(places) != 2 or "to" not in own:
        raise ConfigError("slime convert SOURCE TARGET --to NAME [--option value ...]")
    registry = Registry.from_environment()
    name = own["to"]
    resolved = registry.resolve(groups.CONVERTERS, name, where="--to")
    flags = FlagTable.of(
        option_flags(resolved.driver.Config, (), resolved.entry.provenance), listed_by=f"slime plugins show {name}"
    )
    options: Mapping[str, Any] = {path[0]: value for path, value in flags.parse(rest[2:])}
    part = PluginSpec(group=groups.CONVERTERS, name=name, options=options).resolve(registry)

    from slime_models.convert import convert as run_conversion

    source, target = (Path(place) for place in places)
    with ProgressBar() as bar:
        done = run_conversion(part, source, target, workers=workers_of(own.get("workers")), report=bar.report)
    again = f", {done.num_resumed} of them by an earlier start" if done.num_resumed else ""
    typer.echo(f"{target}: {done.num_tensors} tensors in {done.num_pieces} pieces{again}; read back and equal")


def taken(words: list[str], names: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """The command's own options, and the other words."""
    own: dict[str, str] = {}
    rest: list[str] = []
    position = 0
    while position < len(words):
        name, has_value, value = words[position].removeprefix("--").partition("=")
        position += 1
        if words[position - 1].startswith("--") and name in names:
            if not has_value:
                if position == len(words):
                    raise ConfigError(f"--{name} requires a value.")
                value, position = words[position], position + 1
            own[name] = value
        else:
            rest.append(words[position - 1])
    return own, rest


def workers_of(text: str | None) -> int:
    if text is None:
        return min(8, os.cpu_count() or 1)
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--workers {text}: not a number of processes. Pass one, such as 4.")
    return int(text)


class ProgressBar:
    """One line for each phase, in bytes."""

    def __enter__(self) -> ProgressBar:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._tasks: dict[str, Any] = {}
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def report(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done)
