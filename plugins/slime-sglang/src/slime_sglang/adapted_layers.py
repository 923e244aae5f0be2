"""The linear layers that SGLang applies adapters to."""

from typing import Final

ADAPTED: Final = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "q_a_proj",
        "kv_a_proj_with_mqa",
        "q_b_proj",
        "kv_b_proj",
        "qkv_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
        "lm_head",
    }
)
"""By the last part of their names: those of `--lora-target-modules`. SGLang refuses others, such as a router's or shared
expert's gate, and the linear attention of Qwen3.5."""
