"""DataSource: where prompts come from. Its position is part of the run's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from pathlib import Path

    from slime_core.types.prompt import Prompt
    from slime_core.types.sample import SampleGroup


class Renderer(Protocol):
    """Turns a raw row into a prompt: keys, chat template, tokens. The kernel's; sources only call it."""

    @property
    def max_prompt_len(self) -> int | None:
        """Tokens; None: prompts of any length are accepted. For messages: `accepts` decides."""

    def render(self, row: Mapping[str, Any], *, group_index: int, origin: str, folder: Path | None = None) -> Prompt:
        """DataError names `origin` if a key is missing, an image does not decode, or the template fails. `folder`: where
        relative paths of images begin."""

    def accepts(self, prompt: Prompt) -> bool:
        """False if it is longer than the maximum prompt length."""


class DataSource(ABC):
    """Draws are numbered for ever; epochs wrap as often as needed."""

    @abstractmethod
    def take(self, num_prompts: int) -> list[Prompt]:
        """The next draws. Fewer than asked only if the source has ended."""

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Position, as JSON: with it `restore` continues with the same draws in the same order."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None: ...

    def observe(self, groups: Sequence[SampleGroup]) -> None:
        """Of a step whose groups are complete: the accepted ones with their rewards, then the rejected ones. What a source
        makes of it decides later draws, and belongs to its state."""
        return

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """Rows of one epoch after slicing and length filter; None: not known or without end."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the data do."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counters to log once, such as rows that were filtered or skipped."""
        return {}


class SourceDriver(Driver["SourceFactory"]):
    """Chosen by data.source; `build` returns a callable that makes the source once the tokenizer is there."""


class SourceFactory(Protocol):
    def __call__(self, renderer: Renderer, *, seed: int) -> DataSource: ...
