"""This rank's pieces of the model: configured, built and wrapped for Megatron."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn

from slime_core.errors import ConfigError, ModelError
from slime_megatron.bridges.bridge import Architecture
from slime_megatron.config import MegatronOptions, megatron_options
from slime_megatron.experts import STACKED, can_be_grouped, expert_name
from slime_megatron.layout import ParallelDims
from slime_megatron.model import PackedGpt
from slime_megatron.options import DATA_PARALLEL, MODEL


@dataclass(frozen=True, kw_only=True)
class Placement:
    device: torch.device
    dtype: torch.dtype
    """Compute dtype of forward and backward."""


def dtype_of(options: MegatronOptions, device: str) -> torch.dtype:
    half = device == "cuda" if options.bf16 is None else options.bf16
    return torch.float16 if options.fp16 else torch.bfloat16 if half else torch.float32


def make_config(
    architecture: Architecture, options: MegatronOptions, shape: ParallelDims, placement: Placement
) -> TransformerConfig:
    """Builds the TransformerConfig. Raises ConfigError for options that have no effect on this model."""
    given = megatron_options(options, MODEL)
    on_gpu = placement.device.type == "cuda"
    fields: dict[str, Any] = {
        # The default of Megatron's own training.
        "bias_activation_fusion": on_gpu,
        # Without dropout and biases only an addition is left of it, and a compiled call costs more.
        "bias_dropout_fusion": on_gpu and architecture.options.get("add_bias_linear", True),
        # The only one that accepts streams of any length.
        "moe_token_dispatcher_type": "alltoall",
        # With two stages, each is the other's previous and next one: batched sends of interleaved pieces would be mixed up.
        "overlap_p2p_comm": shape.vpp > 1,
        "batch_p2p_comm": shape.vpp == 1,
        **architecture.options,
        **given,
        "tensor_model_parallel_size": shape.tp,
        "pipeline_model_parallel_size": shape.pp,
        "virtual_pipeline_model_parallel_size": shape.vpp if shape.vpp > 1 else None,
        "context_parallel_size": shape.cp,
        "expert_model_parallel_size": shape.ep,
        "expert_tensor_parallel_size": shape.etp,
        "sequence_parallel": shape.sequence_parallel,
        "moe_grouped_gemm": options.moe_grouped_gemm is not False and can_be_grouped(architecture.options),
        "bf16": placement.dtype == torch.bfloat16,
        "fp16": placement.dtype == torch.float16,
        "params_dtype": torch.float32 if placement.dtype == torch.float32 else placement.dtype,
        "pipeline_dtype": placement.dtype,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": False,
    }
    # With calculate_per_token_loss Megatron sums over the ranks that share tokens after it has divided by their number. Its
    # balance loss is multiplied by the tokens of all of them, and is correct.
    if fields.get("moe_z_loss_coeff"):
        fields["moe_z_loss_coeff"] *= shape.tp * shape.cp
    if options.moe_grouped_gemm and not can_be_grouped(architecture.options):
        raise ConfigError(
            "backend.moe_grouped_gemm = true: experts of this family have biases, or another activation than gated SiLU. "
            "Leave it out."
        )
    record = MLATransformerConfig if architecture.mla else TransformerConfig
    if given.get("moe_router_bias_update_rate") and not fields.get("moe_router_enable_expert_bias"):
        raise ConfigError("backend.moe_router_bias_update_rate: the routers of this family have no bias. Leave it out.")
    config = record(**fields)
    if architecture.choosers:
        # Latent attention then passes on the inputs of the indexer. Set after Megatron's own check, which refuses context
        # parallelism.
        config.experimental_attention_variant = "dsa"
    return config


def build_chunks(
    config: TransformerConfig,
    architecture: Architecture,
    options: MegatronOptions,
    shape: ParallelDims,
    placement: Placement,
    *,
    head: str,
) -> list[nn.Module]:
    """Builds this rank's pieces of the model, one for each virtual stage, not yet wrapped."""
    chunks = []
    for stage in range(shape.vpp):
        vp_stage = stage if shape.vpp > 1 else None
        chunk = PackedGpt(
            config,
            architecture,
            head=head,
            chunk=options.log_probs_chunk_size,
            device=placement.device,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
            num_ahead=options.mtp_num_layers if head == "lm" else 0,
        )
        mark_parallel(chunk)
        chunk.to(placement.device)
        for name, parameter in chunk.named_parameters():
            # The choice of an indexer has no gradient.
            parameter.requires_grad_(is_trained(name, len(parameter), options) and ".indexer." not in name)
        chunks.append(chunk)
    return chunks


def mark_parallel(chunk: nn.Module) -> None:
    """Marks the matrices that tensor-parallel ranks shard. Megatron does so when it initializes them, which is skipped here."""
    for module in chunk.modules():
        row = isinstance(module, RowParallelLinear)
        if not row and not isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            continue
        if module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, int(row), 1)


def is_trained(name: str, rows: int, options: MegatronOptions) -> bool:
    """`rows`: of the parameter. Experts that share one parameter are matched by the names that they have as separate ones."""
    names = [expert_name(name, number) for number in range(rows)] if STACKED.match(name) else [name]
    trained = {matches(one, options) for one in names}
    if len(trained) > 1:
        raise ConfigError(
            f"backend.freeze_params_name_list, only_train_params_name_list: they select some experts of {name}, which are one "
            "parameter. Set backend.moe_grouped_gemm = false too."
        )
    return trained.pop()


def matches(name: str, options: MegatronOptions) -> bool:
    """Whether the two lists of names select this parameter for training."""
    only = options.only_train_params_name_list
    requested = not only or any(re.search(pattern, name) for pattern in only)
    return requested and not any(re.search(pattern, name) for pattern in options.freeze_params_name_list)


def wrap(
    chunks: Sequence[nn.Module],
    config: TransformerConfig,
    options: MegatronOptions,
    placement: Placement,
    *,
    distributed_optimizer: bool,
) -> list[nn.Module]:
    """Wraps the pieces with gradient buffers and their reduction, in half precision if requested."""
    given: Mapping[str, Any] = megatron_options(options, DATA_PARALLEL)
    data_parallel = DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": True,
            **given,
            "use_distributed_optimizer": distributed_optimizer,
        }
    )
    half = placement.dtype != torch.float32
    return [
        DistributedDataParallel(
            config, data_parallel, in_half_precision(config, chunk) if half else chunk, disable_bucketing=number > 0
        )
        for number, chunk in enumerate(chunks)
    ]


def in_half_precision(config: TransformerConfig, chunk: nn.Module) -> nn.Module:
    """Casts the model, except what routers keep in float32, their biases and counts of tokens. Megatron casts these too, and
    casts biases back when they are used; with its own loading, which comes later."""
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    kept = [dict(router.named_buffers(recurse=False)) for router in routers]
    half: nn.Module = Float16Module(config, chunk)
    for router, buffers in zip(routers, kept, strict=True):
        for name, buffer in buffers.items():
            setattr(router, name, buffer)
    return half


def check_copy(name: str, ours: Architecture, theirs: Architecture) -> None:
    """Raises ModelError if a copy differs: copies are swapped in place, so all but the weights is the trained model's."""
    same = {key: value for key, value in ours.options.items() if not callable(value)}
    other = {key: value for key, value in theirs.options.items() if not callable(value)}
    different = sorted(key for key in same.keys() | other.keys() if same.get(key) != other.get(key))
    beside = ("vocab_size", "tied", "mla", "sandwich_norms", "joint_qk_norm", "choosers", "interleaved_indexer")
    different += [field for field in beside if getattr(ours, field) != getattr(theirs, field)]
    if ours.rotary.factor != theirs.rotary.factor or not torch.equal(ours.rotary.inv_freq, theirs.rotary.inv_freq):
        different.append("rope_parameters")
    if different:
        raise ModelError(
            f'weights "{name}": another architecture than the trained one ({", ".join(different)}). Backend megatron swaps '
            "copies in place. Set this model for a role of its own."
        )
