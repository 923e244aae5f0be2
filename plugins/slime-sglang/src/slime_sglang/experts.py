"""ExpertSizes: reads the expert ids in SGLang's responses.

Legend: L layers including dense ones, K experts per token.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.errors import EngineError
from slime_core.types.routed_experts import RoutedExperts, narrow

COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys of config.json with the number of experts, by model family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    layers: int
    top_k: int
    experts: int

    @classmethod
    def of(cls, model: Path) -> ExpertSizes:
        """The sizes of the model in folder `model`. Raises EngineError if it has no experts."""
        config = json.loads((model / "config.json").read_text())
        text = config.get("text_config") or config
        experts = next((text[name] for name in COUNTS if text.get(name)), 0)
        if not experts or not text.get("num_experts_per_tok"):
            raise EngineError(f"{model} has no experts (config.json), so there are no expert ids. Omit routing replay.")
        return cls(layers=text["num_hidden_layers"], top_k=text["num_experts_per_tok"], experts=experts)

    def read(self, encoded: Any, rows: int) -> RoutedExperts:
        """Decodes meta_info.routed_experts, int32 in base64, to (rows, L, K). Raises ValueError if it is invalid."""
        if encoded is None:
            raise ValueError(f"it has no expert ids, but those of {rows} tokens were requested")
        try:
            ids = np.frombuffer(base64.b64decode(encoded, validate=True), np.int32)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"its expert ids cannot be read: {error}") from error
        if ids.size != rows * self.layers * self.top_k:
            raise ValueError(
                f"it has {ids.size} expert ids, but {rows} tokens in {self.layers} layers have {self.top_k} each"
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < self.experts:
            raise ValueError(f"its expert ids are {ids.min()} to {ids.max()}, but the model has {self.experts}")
        return narrow(ids.reshape(rows, self.layers, self.top_k))
