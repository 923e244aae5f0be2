"""Media: contents of prompts beside text, such as images and videos. The kernel stores them as `Image`s; a plugin converts
them to message parts, tokens and pixels.

An entry of the group is a modality, named as in `data.multimodal_keys`. One `Media` handles all modalities of a run, since they
share messages, tokens and pixels: they come from one distribution, whose drivers build the same object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.driver import Driver
from slime_core.contracts.engine import Capability

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_core.types.batch import Batch, Int32, Int64
    from slime_core.types.image import Image
    from slime_core.types.microbatch import MicroImages
    from slime_core.types.prompt import Message


class MediaRenderer(ABC):
    """Puts the media of rows into prompts, in the driver's process. Calls for each row, in this order: `read`; `place` if
    there is a chat template; `mark`; `expand`. origin: file and row, with which messages of DataErrors begin."""

    @abstractmethod
    def read(self, row: Mapping[str, Any], origin: str, folder: Path | None) -> tuple[Image, ...]:
        """Decodes the media in the row's columns. folder: base of relative paths."""

    @abstractmethod
    def place(self, messages: Sequence[Message], images: Sequence[Image], origin: str) -> list[Message]:
        """Returns the messages with one content part per image, in the form that the chat template reads."""

    @abstractmethod
    def mark(self, text: str, images: Sequence[Image], origin: str) -> str:
        """Returns the rendered text with the model's placeholder text for each image."""

    @abstractmethod
    def expand(self, token_ids: Int32, images: Sequence[Image], origin: str) -> tuple[Int32, tuple[Image, ...]]:
        """Expands placeholders of int32 (T,) `token_ids` to one token per feature; returns them and images with places."""


class MediaPacker(ABC):
    """Computes pixel tensors, in a rank of a trained role."""

    @abstractmethod
    def pack(self, batch: Batch, samples: Int64) -> MicroImages | None:
        """Images of the samples (positions in `batch`) in order; None: they have none. DataError if tokens do not fit."""


class Media(ABC):
    @abstractmethod
    def renderer(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, str], *, trust_remote_code: bool
    ) -> MediaRenderer:
        """columns: data column by modality. Raises ModelError if the model lacks the modalities, or a library is missing."""

    @abstractmethod
    def packer(self, folder: Path, *, trust_remote_code: bool) -> MediaPacker:
        """Reads nothing from the model's `folder` until a sample has an image."""


class MediaDriver(Driver[Media]):
    needs: ClassVar[Capability]
    """Capability that an engine needs for this modality."""
