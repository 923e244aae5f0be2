"""Options that are set and change nothing. They are named once when a run starts, and are not passed to Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

BALANCE_LOSSES: Final = frozenset({"aux_loss", "seq_aux_loss", "global_aux_loss"})
"""Kinds of load balancing that only add a loss; others choose other experts."""


def without_effect(given: Mapping[str, Any]) -> dict[str, str]:
    """Name to reason. `given`: the options that are set."""
    found = {}
    if given.get("sequence_parallel") and given.get("tensor_model_parallel_size", 1) == 1:
        found["sequence_parallel"] = "true: tensor_model_parallel_size is 1"
    kind, coefficient = given.get("moe_router_load_balancing_type"), given.get("moe_aux_loss_coeff")
    kinds = set(kind if isinstance(kind, list) else [kind]) - {None, "none"}
    weighs = any(coefficient if isinstance(coefficient, list) else [coefficient])
    if kinds and kinds <= BALANCE_LOSSES and not weighs:
        found["moe_router_load_balancing_type"] = f"{kind}: moe_aux_loss_coeff is 0"
    if given.get("moe_permute_fusion") and find_spec("transformer_engine") is None:
        found["moe_permute_fusion"] = "true: Transformer Engine, whose kernel it is, is not installed"
    return found
