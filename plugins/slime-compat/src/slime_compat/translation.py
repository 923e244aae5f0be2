"""A launch line on its way to the tables of a run file.

A flag that slime has under the same name sets its key. Others have a rule (`rules`), or are known to have no effect or no
counterpart. Defaults that differ are written out, so that what is trained stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from slime_compat import known_flags
from slime_compat.flag_words import N, custom_config, guessed, number, said
from slime_compat.known_flags import Missing
from slime_compat.launch_line import LaunchLine
from slime_core.registry import Registry

D = TypeVar("D")
SECRETS: Final = frozenset({"wandb-key"})
FUNCTION_FLAGS: Final = ("custom-rm-path", "custom-generate-function-path", "dynamic-sampling-filter-path")
"""Functions that run here as they are."""


@dataclass(frozen=True, slots=True)
class Note:
    """A flag that is not in the run file, or not as it was."""

    flag: str
    text: str
    trains: bool
    """What is trained may be another thing for it."""


@dataclass(slots=True)
class Translation:
    """`tables` and `notes` are what came out."""

    line: LaunchLine
    registry: Registry
    backend: str
    engine: str
    tables: dict[str, Any] = field(init=False, default_factory=dict)
    notes: list[Note] = field(init=False, default_factory=list)
    given: dict[str, list[str]] = field(init=False, default_factory=dict)
    """Flags to their words; a flag that was repeated has the last one's, but lists of evaluation sets all."""
    done: set[str] = field(init=False, default_factory=set)
    of_file: set[str] = field(init=False, default_factory=set)
    """Those that stand in the file of --custom-config-path alone."""

    def __post_init__(self) -> None:
        for name, words in said(self.line.words, self.note):
            if name == "eval-prompt-data":
                self.given.setdefault(name, []).extend(words)
            else:
                self.given[name] = words
        self.done.add("custom-config-path")
        for name, words in custom_config(self.given.get("custom-config-path", [])[-1:]):
            self.of_file.add(name)
            self.given[name] = words

    @property
    def reads_args(self) -> bool:
        return any(name in self.given for name in FUNCTION_FLAGS)

    def take(self, name: str) -> str | None:
        """The only or last word of a flag, which no other rule sees then; a switch that was said is "true"."""
        words = self.given.get(name)
        self.done.add(name)
        return None if words is None else (words[-1] if words else "true")

    def number(self, name: str, kind: type[N], default: D) -> N | D:
        """As `take`. `default` where the flag is not said, and where its word is no number, which is noted."""
        words = self.given.get(name)
        self.done.add(name)
        if words:
            try:
                return number(words[-1], kind)
            except ValueError as error:
                self.note(name, f"{error}", trains=True)
        elif words is not None:
            self.note(name, "wants a value", trains=True)
        return default

    def put(self, path: str, value: Any) -> None:
        table = self.tables
        *outer, last = path.split(".")
        for key in outer:
            table = table.setdefault(key, {})
        table[last] = value

    def note(self, flag: str, text: str, *, trains: bool = False) -> None:
        self.notes.append(Note(flag, text, trains))

    def missing(self, flag: str, of: Missing) -> None:
        self.note(flag, f"{of.why}; {of.what_to_do}", trains=of.trains)

    def args(self) -> dict[str, Any]:
        """What was said, by the names that old functions read; what is of trainers, engines and trackers is none of theirs."""
        hidden = known_flags.SHAPE | known_flags.MEGATRON | SECRETS | set(known_flags.WITHOUT_EFFECT)
        said_here = {
            name: guessed(words)
            for name, words in self.given.items()
            if name not in hidden and not name.startswith(("sglang-", "router-", "wandb-", "tb-"))
        }
        return {name.replace("-", "_"): value for name, value in sorted(said_here.items())}
