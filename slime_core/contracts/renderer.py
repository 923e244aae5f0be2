"""Renderer: turns a raw row into a prompt: keys, chat template, tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_core.contracts.media import MediaRenderer
    from slime_core.types.prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderSettings:
    """Keys of the data table, or of an evaluation set, and the run's limits."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    media_keys: frozenset[str] = frozenset()
    """Columns of images and videos."""
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_len: int | None = None
    """In tokens; None: the run sets none."""
    context_len: int | None = None
    """Tokens that the model reads; a prompt leaves one of them for the response."""
    max_unknown_share: float = 0.0
    """See `data.max_unknown_share`."""


class Renderer(ABC):
    """One for each table of data; sources call it."""

    @property
    @abstractmethod
    def max_prompt_len(self) -> int | None:
        """In tokens, for messages; None: the run sets none. `accepts` decides."""

    @property
    @abstractmethod
    def limit(self) -> str:
        """Why `accepts` refuses a prompt, for messages: `rollout_max_prompt_len is 512`."""

    @abstractmethod
    def render(self, row: Mapping[str, Any], *, group_index: int, origin: str, folder: Path | None = None) -> Prompt:
        """Raises DataError if a key is missing, an image does not decode, or the template fails. group_index: number of the
        draw; origin: file and row, for messages; folder: base of relative paths of images."""

    @abstractmethod
    def accepts(self, prompt: Prompt) -> bool:
        """False if it is longer than the maximum prompt length, or leaves the model no token for a response."""

    def notices(self) -> Sequence[str]:
        """Sentences on rows that were left out so far, or that the tokenizer changes."""
        return ()


class RendererFactory(Protocol):
    def __call__(
        self, tokenizer: PreTrainedTokenizerBase, settings: RenderSettings, media: MediaRenderer | None
    ) -> Renderer:
        """media: inserts images and videos into messages, text and tokens; None: the run has none."""


class RendererDriver(Driver[RendererFactory]):
    """Chosen by data.renderer; `build` returns a function that makes the renderer once the tokenizer is loaded."""
