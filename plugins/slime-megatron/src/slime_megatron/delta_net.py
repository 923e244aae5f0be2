"""Gated delta net: linear attention with a new state for every packed sequence (Qwen3-Next).

Megatron-core's own layer refuses packed sequences and context parallelism. Heads of keys, each with the values that it serves,
are shared by tensor-parallel ranks; under context parallelism each rank of the group computes whole sequences of a part of
them, between two exchanges.

Legend: N tokens that this rank holds, M those of its context-parallel group, K heads of keys on this rank (K' under context
parallelism), R heads of values for each, D and D' their dims, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from slime_training.context_parallel import held_positions
from slime_training.delta_rule import RecurrencePlan, causal_conv, gated_delta_rule, plan_recurrence


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaPlan:
    """How states run through one micro-batch; built once, used by all layers."""

    recurrence: RecurrencePlan
    """Plan for whole sequences."""
    order: Tensor | None = None
    """(M,) int64: the row, in the tokens of all ranks of the group concatenated, of each token of the sequences; None: they are
    the stream."""
    places: Tensor | None = None
    """Inverse of `order`."""
    group: dist.ProcessGroup | None = None
    """Context-parallel group, each rank of which holds N tokens."""


def plan_delta(
    cu_seqlens: Tensor, padding: int, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> DeltaPlan:
    """`cu_seqlens` (S + 1,): of the whole stream, padded for the zigzag layout if there is a `group`. `padding`: tokens at the
    end of every rank's part, which form a sequence of their own."""
    size = 1 if group is None else group.size()
    lengths = np.append(np.diff(cu_seqlens.numpy().astype(np.int64)), padding * size)
    recurrence = plan_recurrence(lengths, device)
    if group is None:
        return DeltaPlan(recurrence=recurrence)
    total = int(cu_seqlens[-1])
    held = [held_positions(cu_seqlens, rank, size) for rank in range(size)]
    ends = [total + rank * padding + torch.arange(padding) for rank in range(size)]
    places = torch.cat([part for both in zip(held, ends, strict=True) for part in both])
    return DeltaPlan(recurrence=recurrence, order=places.argsort().to(device), places=places.to(device), group=group)


class Exchange(torch.autograd.Function):
    """(size of the group, ...): swaps part j of rank i with part i of rank j; the backward does the same with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, grads[0].contiguous(), group=ctx.group)
        return out, None


def whole_sequences(x: Tensor, plan: DeltaPlan) -> Tensor:
    """(N, K, F) to (M, K', F)"""
    if plan.group is None or plan.order is None:
        return x
    parts = Exchange.apply(x.unflatten(1, (plan.group.size(), -1)).transpose(0, 1), plan.group)
    return parts.flatten(0, 1).flatten(1).index_select(0, plan.order).unflatten(1, (-1, x.shape[-1]))


def own_tokens(x: Tensor, plan: DeltaPlan) -> Tensor:
    """(M, K', F) to (N, K, F)"""
    if plan.group is None or plan.places is None:
        return x
    rows = x.flatten(1).index_select(0, plan.places).unflatten(1, x.shape[1:])
    parts = Exchange.apply(rows.unflatten(0, (plan.group.size(), -1)), plan.group)
    return parts.transpose(0, 1).flatten(1, 2)


class GatedNorm(nn.Module):
    """Norm of each head; the same weight on every rank, for its own heads."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.linear_value_head_dim, dtype=config.params_dtype))
        self.eps = config.layernorm_epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed = copy_to_tensor_model_parallel_region(self.weight) * wide.to(x.dtype)
        return (normed * nn.functional.silu(gate.to(wide.dtype))).to(x.dtype)


class DeltaNet(MegatronModule):
    """Replaces a layer's attention. Rows of all weights are grouped by key head: its query, its key, its values, their gates,
    strengths and decays."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: Any = None, cp_comm_type: str | None = None
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        heads = config.linear_num_key_heads
        self.repeats = config.linear_num_value_heads // heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        wide = self.repeats * self.value_dim
        self.sizes = [2 * self.key_dim + wide, wide, self.repeats, self.repeats]
        linear_options = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            heads * sum(self.sizes),
            init_method=config.init_method,
            gather_output=False,
            **linear_options,
        )
        self.out_proj = RowParallelLinear(
            heads * wide,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear_options,
        )
        self.heads = heads // pg_collection.tp.size()

        def shared(rows: int, *more: int) -> nn.Parameter:
            parameter = nn.Parameter(torch.empty(self.heads * rows, *more, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            return parameter

        self.conv_weight = shared(self.sizes[0], 1, config.linear_conv_kernel_dim)
        self.dt_bias, self.A_log = shared(self.repeats), shared(self.repeats)
        self.norm = GatedNorm(config)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Any, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(N, 1, H), or this rank's part of N under sequence parallelism, to the same shape."""
        plan: DeltaPlan = packed_seq_params.delta
        mixed, _ = self.in_proj(hidden_states)
        mixed = whole_sequences(mixed[:, 0].unflatten(1, (self.heads, -1)), plan)
        qkv, gate, strength, decay = mixed.split(self.sizes, dim=-1)
        conv, dt_bias, a_log = (self._own(weight, plan) for weight in (self.conv_weight, self.dt_bias, self.A_log))
        qkv = causal_conv(qkv.flatten(1), conv.flatten(1), plan.recurrence).unflatten(1, (mixed.shape[1], -1))
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.sizes[1]], dim=-1)
        wide = torch.promote_types(decay.dtype, torch.float32)
        log_decay = -a_log.to(wide).exp() * nn.functional.softplus(decay.flatten(1).to(wide) + dt_bias.to(wide))
        out = gated_delta_rule(
            q,
            k,
            v.reshape(len(v), -1, self.value_dim),
            log_decay,
            strength.flatten(1).sigmoid(),
            plan.recurrence,
        )
        out = self.norm(out, gate.reshape(out.shape))
        out = own_tokens(out.reshape(len(out), mixed.shape[1], -1), plan)
        output, bias = self.out_proj(out.flatten(1)[:, None])
        return output, bias

    def _own(self, weight: Tensor, plan: DeltaPlan) -> Tensor:
        """The rows of the heads that this context-parallel rank computes."""
        if plan.group is None:
            return weight
        return weight.chunk(plan.group.size())[plan.group.rank()]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, tp_group: Any = None
    ) -> dict[str, Any]:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tp_group = tp_group or parallel_state.get_tensor_model_parallel_group()
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            found |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=tp_group
            )
        return found
