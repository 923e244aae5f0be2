"""CheckpointSizes: sizes in the model's files of dimensions that SGLang pads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSizes:
    """On a CPU, SGLang enlarges sizes of a model's config that do not fit its ranks, and keeps the model's own under
    `original_...`. None: not enlarged."""

    dense: int | None
    """Width of an MLP."""
    experts: int | None
    """Width of an expert."""
    shared_expert: int | None
    """Width of Qwen's `shared_expert`."""
    shared_experts: int | None
    """Width of DeepSeek's `shared_experts`, which are one MLP."""
    tower: int | None
    """Width of an MLP of the vision tower."""
    tower_heads: int | None
    attention: tuple[int, int]
    """Attention heads, as SGLang has them and as files do."""
    keys: tuple[int, int]
    """Heads of keys and values, likewise."""

    @classmethod
    def of(cls, config: Any) -> Self:
        vision = getattr(config, "vision_config", None)
        text = getattr(config, "text_config", config)
        dense = getattr(text, "original_intermediate_size", None)
        # Some mixtures have one size for both.
        experts = (
            getattr(text, "original_moe_intermediate_size", None) if hasattr(text, "moe_intermediate_size") else dense
        )
        heads = getattr(text, "num_attention_heads", 0)
        keys = getattr(text, "num_key_value_heads", None) or heads
        return cls(
            dense=dense,
            experts=experts,
            shared_expert=getattr(text, "original_shared_expert_intermediate_size", None),
            shared_experts=None if experts is None else experts * (getattr(text, "n_shared_experts", None) or 1),
            tower=getattr(vision, "original_intermediate_size", None),
            tower_heads=getattr(vision, "original_num_heads", getattr(vision, "num_heads", None)),
            attention=(heads, getattr(text, "original_num_attention_heads", heads)),
            keys=(keys, getattr(text, "original_total_num_kv_heads", keys)),
        )

    def mlp(self, path: str) -> int | None:
        """Width of the MLP that a module at `path` belongs to."""
        if ".visual." in path:
            return self.tower if ".visual.blocks." in path else None
        if ".shared_experts." in path:
            return self.shared_experts
        return self.shared_expert if ".shared_expert." in path else self.dense

    def heads(self, held: int) -> int:
        return self.attention[1] if held == self.attention[0] else held

    def kv_heads(self, held: int) -> int:
        return self.keys[1] if held == self.keys[0] else held

    def outputs(self, path: str, held: int) -> int | None:
        """Rows in files of a matrix with `held` rows over all ranks."""
        if path.endswith((".linear_fc1", ".gate_proj", ".up_proj")):
            return self.mlp(path)
        return self._of_heads(held) if path.endswith((".q_proj", ".q_b_proj", ".kv_b_proj")) else None

    def inputs(self, path: str, held: int) -> int | None:
        """Columns, likewise."""
        if path.endswith((".linear_fc2", ".down_proj")):
            return self.mlp(path)
        return self._of_heads(held) if path.endswith((".o_proj", ".out_proj")) else None

    def _of_heads(self, held: int) -> int | None:
        padded, own = self.attention
        return held // padded * own if padded and not held % padded else None
