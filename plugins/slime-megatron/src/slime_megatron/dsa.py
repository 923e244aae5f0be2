"""DeepSeek sparse attention: an indexer chooses the keys of each query (DeepSeek-V3.2; GLM-5, where a layer may use the choice
of the layer before it: arXiv 2603.12201).

Megatron-core's own requires a package of CUDA kernels and refuses packed sequences and context parallelism. Where no sequence
is longer than what an indexer chooses, attention is dense. The indexer is not trained: its choice has no gradient.

Legend: N tokens that this rank holds under context parallelism, n those of it under sequence parallelism, M keys of the group,
S segments of a block with Lq queries and Lk keys, J heads and D dim of the indexer, R of them rotated.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from slime_core.errors import ConfigError
from slime_megatron.attention import AttentionPlan, Block, PackedAttention, PackedPlan, attend_blocks
from slime_megatron.rope import RotaryCache, rotated
from slime_training.key_gather import ALL_GATHER

LAYER_NORM_EPSILON = 1e-6


class Indexer(nn.Module):
    """The indexer, replicated on every tensor-parallel rank."""

    def __init__(self, config: MLATransformerConfig) -> None:
        super().__init__()
        self.heads, self.dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        linear_options = {"bias": False, "dtype": config.params_dtype}
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.dim, **linear_options)
        self.wk = nn.Linear(config.hidden_size, self.dim, **linear_options)
        self.k_norm = nn.LayerNorm(self.dim, eps=LAYER_NORM_EPSILON, dtype=config.params_dtype)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, **linear_options)

    def forward(self, hidden: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Any:
        """(N, H) or (n, H), (n, latent), (N, R / 2) twice, to (N, J, D), (N, D) and (N, J) float32"""
        found = torch.cat([latent, self.k_norm(self.wk(hidden)), self.weights_proj(hidden)], dim=-1)
        if len(found) != len(cos):
            found = gathered(found, parallel_state.get_tensor_model_parallel_group())
        latent, k, weights = found.split([latent.shape[-1], self.dim, self.heads], dim=-1)
        q = self.wq_b(latent).unflatten(-1, (self.heads, self.dim))
        q = rotated(q, cos[:, None], sin[:, None], interleaved=interleaved)
        k = rotated(k, cos, sin, interleaved=interleaved)
        return q, k, weights.float() * (self.heads * self.dim) ** -0.5


def gathered(x: Tensor, group: Any) -> Tensor:
    """Concatenates the tensors of all ranks."""
    out = x.new_empty((len(x) * group.size(), *x.shape[1:]))
    ALL_GATHER(out, x.contiguous(), group=group)
    return out


class DSAttention(PackedAttention):
    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        chooser: int | None = None,
        interleaved: bool = False,
        **more: Any,
    ) -> None:
        """`chooser`: number of the layer whose choice is used; None: this layer's own. `interleaved`: the indexer's
        rotation."""
        super().__init__(config, layer_number, attn_mask_type, attention_type, **more)
        if config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ()):
            raise ConfigError(
                'backend.recompute_modules: "core_attn" is not recomputed where an indexer chooses keys. Leave it out, or '
                "set backend.recompute_granularity = full."
            )
        self.topk, self.interleaved = config.dsa_indexer_topk, interleaved
        self.number, self.chooser = layer_number, layer_number if chooser is None else chooser
        self.indexer = Indexer(config) if self.chooser == layer_number else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedPlan,
        x: Tensor,
        qr: Tensor,
        **unused: Any,
    ) -> Tensor:
        """`x` and `qr`: the layer's input and its latent queries."""
        plan = packed_seq_params.plan
        if any(block.key_length > self.topk for block in plan.blocks) and self.indexer is not None:
            packed_seq_params.chosen[self.number] = self.choose(x, qr, plan, packed_seq_params.rotation)
        self.masks = packed_seq_params.chosen.get(self.chooser)
        return super().forward(query, key, value, packed_seq_params=packed_seq_params)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        masks, self.masks = self.masks, None
        if masks is None:
            return super().attend(q, k, v, plan)
        return attend_blocks(q, k, v, plan, self.softmax_scale, masks)

    @torch.no_grad()
    def choose(self, x: Tensor, qr: Tensor, plan: AttentionPlan, rotation: RotaryCache) -> list[Tensor]:
        """(S, 1, Lq, Lk) bool for each block."""
        assert self.indexer is not None
        q, k, weights = self.indexer(x.flatten(0, -2), qr, rotation.cos, rotation.sin, interleaved=self.interleaved)
        if plan.group is not None:
            k = gathered(k, plan.group)
        return [
            block.mask
            if block.key_length <= self.topk
            else chosen(q[block.query_rows], k[block.key_rows], weights[block.query_rows], block, self.topk)
            for block in plan.blocks
        ]


def chosen(q: Tensor, k: Tensor, weights: Tensor, block: Block, topk: int) -> Tensor:
    """(S Lq, J, D), (S Lk, D), (S Lq, J) to (S, 1, Lq, Lk) bool: among the keys that a query sees, the `topk` with the highest
    sum over heads of weight x relu(query x key)."""
    rows = (block.num_segments, block.query_length)
    q, weights = q.unflatten(0, rows).float(), weights.unflatten(0, rows)
    k = k.unflatten(0, (block.num_segments, block.key_length)).float()
    scores = q.new_zeros((*rows, block.key_length))
    # Head by head: the tensor of all heads would be many times larger.
    for head in range(q.shape[2]):
        scores += weights[:, :, head, None] * (q[:, :, head] @ k.mT).relu_()
    scores.masked_fill_(~block.mask[:, 0], -torch.inf)
    found = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(topk).indices, True)
    return found[:, None] & block.mask
