"""AdapterEngine: what an engine with `Capability.ADAPTERS` has beside `RolloutEngine`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime_core.types.weights import Bucket


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogProbs:
    """Of a prompt of T tokens, at temperature 1."""

    log_probs: npt.NDArray[np.float32]
    """(T - 1,) nats, of its tokens but the first."""
    top_ids: npt.NDArray[np.int32]
    """(T - 1, K) the K likeliest tokens in the place of each of these, the likeliest first."""
    top_log_probs: npt.NDArray[np.float32]
    """(T - 1, K) nats."""


class AdapterEngine(ABC):
    @abstractmethod
    async def load_adapter(self, name: str, scale: float, bucket: Bucket) -> None:
        """Requests may name it from now on (`GenerateRequest.adapter`). bucket: its matrices by the names of `LowRank.tensors`.
        Raises EngineRefused for one too many, a name in use or layers that the model does not have."""

    @abstractmethod
    async def drop_adapter(self, name: str) -> None:
        """Frees its memory. Requests that use it end with finish reason abort. It need not exist."""

    @abstractmethod
    async def prompt_log_probs(
        self, prompts: Sequence[npt.NDArray[np.int32]], top_k: int, adapter: str | None
    ) -> list[PromptLogProbs]:
        """Raises EngineRefused for an adapter that is not loaded, or a top_k beyond the vocabulary."""
