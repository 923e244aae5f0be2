"""Linear attention of transformers' models on packed streams. By default, transformers continues convolutions and states from
one sequence into the next, unless two packages of kernels are installed.

Legend: N tokens, F features, W taps, H heads, D and D' their dims.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from slime_core.errors import ModelError
from slime_training.delta_rule import RecurrencePlan, causal_conv, gated_delta_rule


def delta_nets(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "chunk_gated_delta_rule")]


def pack_delta_nets(model: PreTrainedModel) -> None:
    """Replaces the two operations of these layers by ones that use the plan."""
    for module in delta_nets(model):
        module.causal_conv1d_fn = packed_conv
        module.chunk_gated_delta_rule = packed_rule


def delta_arguments(plan: RecurrencePlan | None) -> dict[str, Any]:
    """The two arguments that a model passes unread to these operations."""
    return {} if plan is None else {"seq_idx": plan, "cu_seq_lens_q": plan}


def packed_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu", seq_idx: Any = None
) -> Tensor:
    """(1, F, N), (F, W) to (1, F, N)"""
    if bias is not None or activation != "silu" or not isinstance(seq_idx, RecurrencePlan):
        raise ModelError("the model's linear attention has a bias or no SiLU, or keeps its plan: it cannot be packed.")
    return causal_conv(x[0].t(), weight, seq_idx).t()[None]


def packed_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Any = None, **unused: Any
) -> tuple[Tensor, None]:
    """(1, N, H, D), (1, N, H, D), (1, N, H, D'), (1, N, H), (1, N, H) to (1, N, H, D')"""
    if not isinstance(cu_seqlens, RecurrencePlan):
        raise ModelError("the model's linear attention keeps its plan: it cannot be packed.")
    return gated_delta_rule(query[0], key[0], value[0], g[0], beta[0], cu_seqlens)[None], None
