"""Vocabulary: token ids of a caller are checked before they go to trainers and engines, which serve others too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slime_core.config.bound import BoundRun
from slime_core.data.model_folder import read_model_config
from slime_core.errors import DataError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    size: int | None
    """None: config.json does not have it."""

    @classmethod
    def of(cls, run: BoundRun) -> Vocabulary:
        config = read_model_config(Path(run.config.model.hf_checkpoint))
        size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
        return cls(size if isinstance(size, int) else None)

    def require(self, tokens: npt.NDArray[np.integer], where: str) -> None:
        """DataError for ids that the model does not have."""
        if len(tokens) and (tokens.min() < 0 or (self.size is not None and tokens.max() >= self.size)):
            raise DataError(
                f"{where}: token ids from {tokens.min()} to {tokens.max()}; the model's vocabulary has {self.size}. Use its "
                "tokenizer."
            )
