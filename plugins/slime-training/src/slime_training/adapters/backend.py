"""AdapterBackend: what a backend has beside `TrainBackend` that trains several adapters over one frozen base."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from slime_core.types.weights import Bucket
from slime_training.adapters.folder import AdapterCopy
from slime_training.adapters.shape import AdapterShape


class AdapterBackend(ABC):
    """All ranks make the same calls in the same order. `forward_only` of the trained weights, `forward_backward` and
    `optim_step` are those of the adapter in use; without one `forward_only` is the base's, and the others raise TrainingError.
    What an adapter computes does not depend on the others, to the bit."""

    @abstractmethod
    def use_adapter(self, name: str | None) -> None:
        """None: none. Gradients and optimizer state of the others stay as they are."""

    @abstractmethod
    def add_adapter(self, name: str, shape: AdapterShape, seed: int) -> None:
        """A new one, which changes nothing yet. Raises ModelError for layers that the model does not have."""

    @abstractmethod
    def load_adapter(self, name: str, folder: Path, optimizer: bool) -> int:
        """A new one, which `save_adapter` wrote. optimizer: with its optimizer state and step count. Returns the optimizer
        steps that it has taken. Raises ModelError for a folder that does not fit the model, CheckpointError if it has no
        optimizer state."""

    @abstractmethod
    def remove_adapter(self, name: str) -> None:
        """Frees its memory. It need not exist."""

    @abstractmethod
    def save_adapter(self, name: str, folder: Path, optimizer: bool) -> None:
        """Writes a folder in peft's format, which all ranks share; with `optimizer` also its optimizer state. It is complete or
        does not exist. Raises StorageError."""

    @abstractmethod
    def copy_adapter(self, name: str, optimizer: bool) -> AdapterCopy | None:
        """What `save_adapter` would write now, to be written while training continues; None on ranks other than 0."""

    @abstractmethod
    def export_adapter_of(self, name: str) -> Bucket | None:
        """Its matrices in the dtype that forwards compute in, by the names of `LowRank.tensors`; None on ranks other than 0."""
