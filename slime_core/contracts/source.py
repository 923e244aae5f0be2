"""DataSource: provides prompts. Its position is part of the run's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.contracts.driver import Driver
from slime_core.contracts.renderer import Renderer

if TYPE_CHECKING:
    from slime_core.types.prompt import Prompt
    from slime_core.types.sample import SampleGroup


class DataSource(ABC):
    """Draws are numbered over all epochs; a new epoch starts when the rows are used up."""

    @abstractmethod
    def take(self, num_prompts: int) -> list[Prompt]:
        """Returns the next `num_prompts` draws; fewer only if the source has ended."""

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Returns the position as JSON types; after `restore(state)` the same draws follow in the same order."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues at the position of `state`, also in a new process. Raises DataError if the data do not have it."""

    def observe(self, groups: Sequence[SampleGroup]) -> None:
        """Called when the groups of a step are complete. groups: the accepted ones with their rewards, then the rejected ones.
        If later draws depend on them, that belongs to `state`."""
        return

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """Rows of one epoch after slicing and length filter; None: not known or unlimited."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that changes when the data change."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counters to log, such as filtered or skipped rows, by metric name."""
        return {}


class SourceDriver(Driver["SourceFactory"]):
    """Chosen by data.source; `build` returns a function that builds the source once the tokenizer is loaded."""


class SourceFactory(Protocol):
    def __call__(self, renderer: Renderer, *, seed: int) -> DataSource:
        """seed: decides a random order."""
