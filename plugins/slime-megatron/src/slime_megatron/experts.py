"""Experts of a layer: the weights of all experts of a rank are one parameter each, so that two grouped products compute them.

In checkpoints they are what Megatron's experts one after the other (SequentialMLP) are, key by key: either loads the other's.

Legend: E experts of this rank, N rows of tokens that were sent to them, H hidden, F features of an expert on this rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime_megatron.grouped_products import GroupedProduct, Groups

STACKED: Final = re.compile(r"^(.*\bmlp\.experts)\.(linear_fc[12]\.weight)$")
"""Names of the parameters."""
LINEARS: Final = ("linear_fc1", "linear_fc2")
LOCAL: Final = "local_experts"


def expert_name(name: str, number: int) -> str:
    """Megatron's name of one expert's part of a parameter."""
    return STACKED.sub(rf"\1.{LOCAL}.{number}.\2", name)


def can_be_grouped(options: Mapping[str, Any]) -> bool:
    """Whether experts of such a TransformerConfig can be grouped: gated SiLU without biases."""
    return bool(
        options.get("num_moe_experts")
        and options.get("gated_linear_unit")
        and options.get("activation_func") is nn.functional.silu
        and not options.get("add_bias_linear", True)
    )


class StackedLinear(nn.Module):
    """One parameter (E, out, in), sharded along `axis` over the ranks that share each expert."""

    def __init__(self, shape: tuple[int, int, int], axis: int, config: TransformerConfig) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, axis, 1)
        # Gradients are summed over the ranks that hold the same experts.
        self.weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]


class GroupedExperts(MegatronModule):
    """Replaces Megatron's experts."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.ep_group = pg_collection.ep
        self.tp_group = pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        features = config.moe_ffn_hidden_size // self.tp_group.size()
        # For each expert, gates come before the rows that they gate.
        self.linear_fc1 = StackedLinear((num_local_experts, 2 * features, config.hidden_size), 1, config)
        self.linear_fc2 = StackedLinear((num_local_experts, config.hidden_size, features), 2, config)
        self.recomputes = config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        self.register_load_state_dict_pre_hook(without_extra_states)

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """`hidden`: (N, H), by expert. `tokens_per_expert`: (E,). `probs`: (N,), the weights of the experts' outputs. Returns
        (N, H), a part of the sum if ranks share each expert."""
        groups = Groups.of(tokens_per_expert, hidden.device)
        inner = GroupedProduct.apply(hidden, self.linear_fc1.weight, groups)
        if not self.recomputes:
            return GroupedProduct.apply(self.activated(inner, probs), self.linear_fc2.weight, groups), None
        again = CheckpointWithoutOutput(fp8=self.config.fp8)
        found = GroupedProduct.apply(again.checkpoint(self.activated, inner, probs), self.linear_fc2.weight, groups)
        again.discard_output_and_register_recompute(found)
        return found, None

    def activated(self, inner: Tensor, probs: Tensor) -> Tensor:
        """(N, 2F) to (N, F): gated and weighted, the same as in Megatron's experts."""
        scale = probs[:, None]
        if self.config.bias_activation_fusion:
            found: Tensor = weighted_bias_swiglu_impl(inner, None, scale, self.config.activation_func_fp8_input_store)
            return found
        gate, up = inner.chunk(2, dim=-1)
        return (nn.functional.silu(gate) * up * scale).to(inner.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Has the keys and global shapes of SequentialMLP, with the empty states of its linear layers, which it requires when
        it loads."""
        axis = len(sharded_offsets)
        replica = (0, 0, self.dp_group.rank())
        here = (axis, self.ep_group.rank(), self.ep_group.size())
        shared = (self.tp_group.rank(), self.tp_group.size())
        found: dict[str, Any] = {
            f"{prefix}linear_fc1.weight": gates_apart(
                f"{prefix}experts.linear_fc1.weight", self.linear_fc1.weight, (*sharded_offsets, here), shared, replica
            ),
            f"{prefix}linear_fc2.weight": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.linear_fc2.weight",
                self.linear_fc2.weight,
                *sharded_offsets,
                here,
                (axis + 2, *shared),
                replica_id=replica,
                prepend_axis_num=axis,
            ),
        }
        whole = self.num_local_experts * self.ep_group.size()
        for number in range(self.num_local_experts):
            expert = self.ep_group.rank() * self.num_local_experts + number
            _, offsets, sizes = zip(*sharded_offsets, (axis, expert, whole), strict=True)
            for linear in LINEARS:
                found[f"{prefix}{LOCAL}.{number}.{linear}._extra_state"] = ShardedObject(
                    f"{prefix}experts.{linear}._extra_state",
                    None,
                    sizes,
                    offsets,
                    (0, self.tp_group.rank(), self.dp_group.rank()),
                )
        return found


def gates_apart(
    key: str, weight: Tensor, offsets: tuple[Any, ...], shared: tuple[int, int], replica: tuple[int, ...]
) -> ShardedTensorFactory:
    """Describes (E, 2F, H): gates of all ranks come before the rows that they gate. `offsets`: of layers and experts. `shared`:
    this rank's index and the number of ranks that share each expert."""
    rank, ranks = shared
    axis = len(offsets)

    @torch.no_grad()
    def build(key: str, weight: Tensor, replica: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                *offsets,
                (axis, rank + number * ranks, 2 * ranks),
                replica_id=replica,
                prepend_axis_num=axis - 1,
            )
            for number, half in enumerate(weight.chunk(2, dim=1))
        ]

    def merge(halves: list[Tensor]) -> Tensor:
        return torch.cat(halves, dim=1)

    return ShardedTensorFactory(key, weight, build, merge, replica)


def without_extra_states(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}{LOCAL}.")]:
        del state[name]
