"""Expert ids as SGLang tells them, and of which model.

Legend: L layers, dense ones included, K experts a token.
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
"""What families call the number of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    layers: int
    top_k: int
    experts: int

    @classmethod
    def of(cls, model: Path) -> ExpertSizes:
        """EngineError if the model has no experts."""
        config = json.loads((model / "config.json").read_text())
        text = config.get("text_config") or config
        experts = next((text[name] for name in COUNTS if text.get(name)), 0)
        if not experts or not text.get("num_experts_per_tok"):
            raise EngineError(f"{model} has no experts (config.json), so none can be told. Leave routing replay out.")
        return cls(layers=text["num_hidden_layers"], top_k=text["num_experts_per_tok"], experts=experts)

    def read(self, told: Any, rows: int) -> RoutedExperts:
        """(rows, L, K) of meta_info.routed_experts, which is int32 in base64. ValueError if it is not."""
        if told is None:
            raise ValueError(f"it has no expert ids, and those of {rows} tokens were asked for")
        try:
            ids = np.frombuffer(base64.b64decode(told, validate=True), np.int32)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"its expert ids cannot be read: {error}") from error
        if ids.size != rows * self.layers * self.top_k:
            raise ValueError(
                f"it has {ids.size} expert ids, and {rows} tokens in {self.layers} layers take {self.top_k} each"
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < self.experts:
            raise ValueError(f"its expert ids go from {ids.min()} to {ids.max()}, and the model has {self.experts}")
        return narrow(ids.reshape(rows, self.layers, self.top_k))
