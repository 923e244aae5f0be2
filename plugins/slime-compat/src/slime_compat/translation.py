"""Translation: the tables and notes that a launch line becomes.

A flag that slime has under the same name sets its key. Other flags have a rule (`rules`), or are listed as having no effect or
no counterpart. Defaults that differ are written into the run file, so that the training stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from slime_compat import known_flags, megatron_flags
from slime_compat.flag_words import N, custom_config, flag_words, guessed, number
from slime_compat.known_flags import Missing
from slime_compat.launch_line import LaunchLine
from slime_compat.notes import Note

D = TypeVar("D")
SECRETS: Final = frozenset({"wandb-key"})
FUNCTION_FLAGS: Final = ("custom-rm-path", "custom-generate-function-path", "dynamic-sampling-filter-path")
"""Flags of functions that run unchanged."""
READ_BY_FUNCTIONS: Final = frozenset({"context-parallel-size"})
"""Flags of trainers that generate functions read: with max-tokens-per-gpu it is the longest sequence that fits."""


@dataclass(slots=True)
class Translation:
    """`tables` and `notes` are the result."""

    line: LaunchLine
    backend: str
    engine: str
    tables: dict[str, Any] = field(init=False, default_factory=dict)
    notes: list[Note] = field(init=False, default_factory=list)
    given: dict[str, list[str]] = field(init=False, default_factory=dict)
    """Flag -> values. A repeated flag has its last values, but --eval-prompt-data has all of them."""
    done: set[str] = field(init=False, default_factory=set)
    of_file: set[str] = field(init=False, default_factory=set)
    """Flags that only the file of --custom-config-path sets."""

    def __post_init__(self) -> None:
        for name, words in flag_words(self.line.words, self.note):
            if name == "eval-prompt-data":
                self.given.setdefault(name, []).extend(words)
            else:
                self.given[name] = words
        self.done.add("custom-config-path")
        if self.line.is_joined:
            self.note(
                "the launch line",
                "a backslash is missing at the end of one of its lines, so bash takes the next one for another command. Its "
                "words are added",
            )
        if self.line.is_env_unread and self.reads_args:
            self.note(
                "runtime-env-json",
                "cannot be read; add the folders of its PYTHONPATH to python_path of the plugins compat in the run file",
            )
        for name, words in custom_config(self.given.get("custom-config-path", [])[-1:]):
            self.of_file.add(name)
            self.given[name] = words

    @property
    def reads_args(self) -> bool:
        return any(name in self.given for name in (*FUNCTION_FLAGS, *known_flags.HOOKS))

    def take(self, name: str) -> str | None:
        """The last value of a flag, which is then marked as done; "true" for a switch, None if the flag is not set."""
        words = self.given.get(name)
        self.done.add(name)
        return None if words is None else (words[-1] if words else "true")

    def number(self, name: str, kind: type[N], default: D) -> N | D:
        """As `take`, converted to `kind`. `default` if the flag is not set or its value is no number, which adds a note."""
        words = self.given.get(name)
        self.done.add(name)
        if words:
            try:
                return number(words[-1], kind)
            except ValueError as error:
                self.note(name, f"{error}", trains=True)
        elif words is not None:
            self.note(name, "requires a value", trains=True)
        return default

    def put(self, path: str, value: Any) -> None:
        table = self.tables
        *outer, last = path.split(".")
        for key in outer:
            table = table.setdefault(key, {})
        table[last] = value

    def note(self, flag: str, text: str, *, trains: bool = False) -> None:
        self.notes.append(Note(flag if " " in flag else f"--{flag}", text, trains))

    def missing(self, flag: str, of: Missing) -> None:
        self.note(flag, f"{of.why}; {of.what_to_do}", trains=of.trains)

    def args(self, *, of_trainer: bool = False) -> dict[str, Any]:
        """The flags as the `args` of old functions, without those of engines and trackers. of_trainer: with the trainers'."""
        hidden = set(SECRETS)
        if not of_trainer:
            hidden |= megatron_flags.SHAPE | set(megatron_flags.OPTIONS) | set(known_flags.WITHOUT_EFFECT)
            hidden -= READ_BY_FUNCTIONS
        given_args = {
            name: guessed(words)
            for name, words in self.given.items()
            if name not in hidden and not name.startswith(("sglang-", "router-", "wandb-", "tb-"))
        }
        return {name.replace("-", "_"): value for name, value in sorted(given_args.items())}
