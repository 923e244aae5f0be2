"""Forward FLOPs of a sequence, from a model's config, for balancing ranks and for perf metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Model sizes that decide the FLOPs of a token."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    """Width of the MLP of a token: the sum over its active experts."""
    vocab: int
    num_linear: int = 0
    """Layers of linear attention, which have no quadratic part; counted as projections of the same sizes."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """config: content of a Hugging Face config.json."""
        config = config.get("text_config", config)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        active = config.get("num_experts_per_tok")
        ffn = config["intermediate_size"] if active is None else active * config["moe_intermediate_size"]
        layers, kinds = config["num_hidden_layers"], config.get("layer_types")
        if kinds is None and (interval := config.get("full_attention_interval")):
            kinds = ["linear_attention"] * (layers - layers // interval)
        return cls(
            num_layers=layers,
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn=ffn,
            vocab=config["vocab_size"],
            num_linear=(kinds or []).count("linear_attention"),
        )

    def forward_flops(self, lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """FLOPs of one forward over sequences of these lengths: projections, attention, MLP, and the head once."""
        tokens = np.asarray(lengths, np.float64)
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linear = 2 * self.hidden * (q + 2 * kv + q) + 6 * self.hidden * self.ffn
        attention = 2 * q * tokens * tokens
        layers = self.num_layers * linear * tokens + (self.num_layers - self.num_linear) * attention
        return layers + 2 * self.hidden * self.vocab * tokens
