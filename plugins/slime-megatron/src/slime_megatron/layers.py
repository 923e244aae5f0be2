"""slime's layers in Megatron's model: the norm, linear layers followed by a norm, and the spec."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from slime_core.errors import ConfigError
from slime_megatron.attention import PackedAttention
from slime_megatron.bridges.bridge import Architecture
from slime_megatron.delta_net import DeltaNet
from slime_megatron.dsa import DSAttention
from slime_megatron.experts import GroupedExperts
from slime_training.fusion import fused_by_rows


class RmsNorm(nn.Module):
    """Megatron's torch norm refuses sequence parallelism: its weight must be marked, as each rank has a part of
    its gradient. This norm rounds to half precision once, as the engines' kernels do."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps
        self.around_one = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not x.is_cuda:
            found = rms_norm(rows, self.weight, self.eps, self.around_one)
        else:
            found = fused_by_rows(rms_norm, rows, weight=self.weight, eps=self.eps, around_one=self.around_one)
        return found.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float, around_one: bool) -> Tensor:
    """(N, H)"""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = weight.to(wide.dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + scale if around_one else scale)).to(x.dtype)


class JointNorm(RmsNorm):
    """Norm of queries or keys over all heads of a token, also those of other tensor-parallel ranks (MiniMax-M2). Every rank has
    the whole weight. Megatron sums its gradient over the ranks, as of every module of this name in an attention."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        """`hidden_size`: features of a head."""
        super().__init__(config, heads * hidden_size, eps)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, H, D), the heads of this rank. If there are fewer heads than ranks, several ranks have the same one."""
        ranks, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum((-2, -1), keepdim=True)
        # Each rank's heads depend on the sum of all ranks, so its gradient is a sum over them too.
        total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = wide * torch.rsqrt(total / (ranks * x.shape[-2] * x.shape[-1]) + self.eps)
        first = rank * self.heads // ranks
        weight = self.weight.view(self.heads, -1)[first : first + x.shape[-2]]
        return (normed * weight.to(wide.dtype)).to(x.dtype)


class NormedRowParallelLinear(RowParallelLinear):
    """GLM-4's norm after attention and MLP."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.post_norm = RmsNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return self.post_norm(output), bias


class ReplicatedLinear(nn.Module):
    """Replicated on every tensor-parallel rank, applied to its own part of the tokens."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """Without Transformer Engine, Megatron shards the rows of this projection over tensor-parallel ranks. The positional part
    of it would then get the gradient of each rank's own heads only."""

    def __init__(self, config: Any, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        outputs = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, outputs)


class GatedAttention(SelfAttention):
    """With fewer key-value heads than tensor-parallel ranks, Megatron leaves each rank the gates of all heads of its group."""

    def get_query_key_value_tensors(self, *args: Any, **more: Any) -> Any:
        found = super().get_query_key_value_tensors(*args, **more)
        if len(found) < 4 or found[3].shape[2] == found[0].shape[2]:
            return found
        query, key, value, gate = found
        share = gate.shape[2] // query.shape[2]
        first = parallel_state.get_tensor_model_parallel_rank() % share * query.shape[2]
        return query, key, value, gate[:, :, first : first + query.shape[2]]


class PackedLayers(LocalSpecProvider):
    """Megatron's own linear layers and experts, with slime's norm and attention."""

    def __init__(self, architecture: Architecture) -> None:
        self.sandwich_norms = architecture.sandwich_norms
        self.interleaved_indexer = architecture.interleaved_indexer
        self.joint_qk_norm = architecture.joint_qk_norm

    def row_parallel_linear(self) -> type:
        return NormedRowParallelLinear if self.sandwich_norms else RowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RmsNorm

    def core_attention(self) -> type:
        return PackedAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules | None]:
        if moe_use_grouped_gemm:
            return GroupedExperts, None
        found: tuple[type, MLPSubmodules | None] = super().grouped_mlp_modules(False, moe_use_legacy_grouped_gemm)
        return found


def block_spec(
    config: TransformerConfig, architecture: Architecture, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Specs of the layers that this pipeline stage holds."""
    provider = PackedLayers(architecture)
    count, offset = get_num_layers_to_build(config, vp_stage), get_transformer_layer_offset(config, vp_stage)
    freq = config.moe_layer_freq
    sparse = freq if isinstance(freq, list) else [int(layer % freq == 0) for layer in range(config.num_layers)]
    linear = config.linear_attention_freq or [0] * config.num_layers
    layers = [
        layer_spec(
            config,
            provider,
            experts=config.num_moe_experts is not None and bool(sparse[layer]),
            linear=bool(linear[layer]),
            chooser=chooser_of(architecture, layer, offset),
        )
        for layer in range(offset, offset + count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RmsNorm)


def chooser_of(architecture: Architecture, layer: int, first: int) -> int | None:
    """`layer`, and `first`, the first layer of this stage, count from 0."""
    if not architecture.choosers:
        return None
    chooser = architecture.choosers[layer]
    if chooser <= first:
        starts = [number - 1 for number, found in enumerate(architecture.choosers, 1) if found == number]
        raise ConfigError(
            f"backend.pipeline_model_parallel_size: layer {layer} uses the keys that layer {chooser - 1} chooses, which "
            f"another stage has. A stage may start at layers {', '.join(map(str, starts))}."
        )
    return chooser


def attention_spec(config: TransformerConfig, provider: PackedLayers, chooser: int | None) -> ModuleSpec:
    columns, rows = provider.column_parallel_linear(), provider.row_parallel_linear()
    qk_norm = RmsNorm if config.qk_layernorm else IdentityOp
    attention: Any
    core: Any = PackedAttention
    if config.dsa_indexer_topk is not None:
        dsa_options = {"chooser": chooser, "interleaved": provider.interleaved_indexer}
        core = ModuleSpec(module=DSAttention, params=dsa_options)
    if config.multi_latent_attention:
        attention = LatentAttention
        submodules: Any = MLASelfAttentionSubmodules(
            linear_q_proj=columns,
            linear_q_down_proj=columns,
            linear_q_up_proj=columns,
            linear_kv_down_proj=columns,
            linear_kv_up_proj=columns,
            core_attention=core,
            linear_proj=rows,
            q_layernorm=qk_norm,
            kv_layernorm=qk_norm,
        )
    else:
        attention = GatedAttention if config.attention_output_gate else SelfAttention
        submodules = SelfAttentionSubmodules(
            linear_qkv=columns,
            core_attention=PackedAttention,
            linear_proj=rows,
            q_layernorm=joint_norm(config.num_attention_heads) if provider.joint_qk_norm else qk_norm,
            k_layernorm=joint_norm(config.num_query_groups) if provider.joint_qk_norm else qk_norm,
        )
    return ModuleSpec(module=attention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def joint_norm(heads: int) -> ModuleSpec:
    return ModuleSpec(module=JointNorm, params={"heads": heads})


def layer_spec(
    config: TransformerConfig,
    provider: PackedLayers,
    *,
    experts: bool,
    linear: bool = False,
    chooser: int | None = None,
) -> ModuleSpec:
    """`linear`: with a gated delta net in place of attention. `chooser`: number of the layer that chooses its keys; None: the
    layer's own choice, if its family has indexers."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=ModuleSpec(module=DeltaNet) if linear else attention_spec(config, provider, chooser),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RmsNorm,
            mlp=get_mlp_module_spec_for_backend(
                backend=provider,
                num_experts=config.num_moe_experts if experts else None,
                moe_grouped_gemm=config.moe_grouped_gemm,
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
