"""Media: what prompts hold beside text, such as images and videos. The kernel carries them as `Image`s; a plugin knows what
they are in messages, tokens and pixels.

An entry of the group is a modality, by the name that `data.multimodal_keys` gives it. A run's modalities share messages, tokens
and pixels, so one `Media` serves all of them: they come from one distribution, whose drivers build the same.
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
    """Puts the media of rows into prompts, in the driver's process. For each row, in this order: `read`; `place` where there
    is a chat template; `mark`; `expand`. DataErrors begin with `origin`."""

    @abstractmethod
    def read(self, row: Mapping[str, Any], origin: str, folder: Path | None) -> tuple[Image, ...]:
        """What the row's columns hold, decoded. `folder`: where relative paths begin."""

    @abstractmethod
    def place(self, messages: Sequence[Message], images: Sequence[Image], origin: str) -> list[Message]:
        """The messages with a content part for each of `images`, as the chat template reads them."""

    @abstractmethod
    def mark(self, text: str, images: Sequence[Image], origin: str) -> str:
        """The rendered text with the marks that the model has learnt for each of `images`."""

    @abstractmethod
    def expand(self, token_ids: Int32, images: Sequence[Image], origin: str) -> tuple[Int32, tuple[Image, ...]]:
        """The text's tokens with one for each feature, and `images` with their places, in the order of these."""


class MediaPacker(ABC):
    """Makes pixels, in a rank of a trained role."""

    @abstractmethod
    def pack(self, batch: Batch, samples: Int64) -> MicroImages | None:
        """What these samples, packed in this order, see; None: nothing. DataError if a sample's tokens do not fit it."""


class Media(ABC):
    @abstractmethod
    def renderer(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, str], *, trust_remote_code: bool
    ) -> MediaRenderer:
        """For the model in `folder`; `columns` by modality. ModelError if it does not take them, or a library is missing."""

    @abstractmethod
    def packer(self, folder: Path, *, trust_remote_code: bool) -> MediaPacker:
        """It reads nothing of the folder before a sample has an image."""


class MediaDriver(Driver[Media]):
    needs: ClassVar[Capability]
    """What an engine must offer for this modality."""
