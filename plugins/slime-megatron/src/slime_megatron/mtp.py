"""Multi-token prediction (MTP): layers behind the last one that predict tokens further ahead (DeepSeek-V3, arXiv 2412.19437,
section 2.2).

Layer k = 1..K combines what layer k - 1 (0: the model) made of position i with the embedding of token i + k, and predicts
token i + k + 1 through the model's own head. Only these layers learn from it: trunk, embedding and head are detached.
Megatron's block does not know packed sequences in our layouts, so its layers are called one by one here, with tokens and
targets that are shifted on the host, where whole sequences are known.

Legend: N tokens that this rank holds, T targets of a layer among them, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime_core.types.microbatch import LossColumns, MicroBatch
from slime_megatron.bridges.bridge import Architecture
from slime_megatron.layers import PackedLayers, layer_spec
from slime_training.context_parallel import split_micro_batch


@dataclass(frozen=True, kw_only=True, eq=False)
class MTPInputs:
    """Inputs of one MTP layer for a micro-batch, on this rank."""

    tokens: Tensor
    """(1, N) int64 with padding: the token k positions after each position, 0 behind the end of its sequence."""
    logit_index: Tensor
    """(T,) int64: positions whose prediction is trained."""
    targets: Tensor
    """(T,) int64"""

    def to(self, device: torch.device) -> MTPInputs:
        return MTPInputs(
            tokens=self.tokens.to(device), logit_index=self.logit_index.to(device), targets=self.targets.to(device)
        )


def ahead_of(micro: MicroBatch, depth: int, cp_rank: int, cp_size: int, padding: int) -> MTPInputs:
    """Inputs of layer `depth` (1..K), from a whole micro-batch on the host. `padding`: tokens added to this rank's part. A
    response token at P + r is predicted from P + r - 1 - depth, if that is in its sequence; loss masks are shifted with it."""
    offsets, tokens = micro.cu_seqlens.numpy().astype(np.int64), micro.tokens.numpy()
    # In numpy, like all work on the host per micro-batch: torch would start its threads for each operation.
    source = np.arange(len(tokens)) + depth
    ends = np.repeat(offsets[1:], np.diff(offsets))
    shifted = np.where(source < ends, tokens[np.minimum(source, len(tokens) - 1)], 0)
    positions = micro.logit_index.numpy()
    starts = offsets[np.searchsorted(offsets[1:], positions, side="right")]
    kept = np.flatnonzero((positions - depth >= starts) & micro.mask.numpy())
    rows = torch.from_numpy(kept)
    part = replace(
        micro,
        tokens=torch.from_numpy(shifted),
        logit_index=torch.from_numpy(positions[kept] - depth),
        targets=micro.targets.index_select(0, rows),
        segments=micro.segments.index_select(0, rows),
        mask=micro.mask.index_select(0, rows),
        columns=LossColumns(),
        routed_experts=None,
    )
    if cp_size > 1:
        part = split_micro_batch(part, cp_rank, cp_size)
    return MTPInputs(
        tokens=nn.functional.pad(part.tokens, (0, padding))[None], logit_index=part.logit_index, targets=part.targets
    )


class EmbeddingElsewhere:
    """The embedding for a stage that does not train it: its weight is fetched before each step, and freed after it."""

    def __init__(self, config: TransformerConfig, vocab_size: int, max_length: int) -> None:
        module = LanguageModelEmbedding(config, vocab_size, max_length, position_embedding_type="none")
        self._module = module.to("meta")
        self.weight: Tensor | None = None
        """(this rank's part of the vocabulary, H)"""

    def __call__(self, **given: Tensor) -> Tensor:
        if self.weight is None:
            raise RuntimeError("call fetch_embedding first")
        found: Tensor = torch.func.functional_call(self._module, {"word_embeddings.weight": self.weight}, kwargs=given)
        return found


def fetch_embedding(chunks: Sequence[Any]) -> None:
    """Broadcasts the embedding from the first stage of the pipeline to the last, which has the layers of multi-token
    prediction. All ranks call it."""
    if not parallel_state.is_rank_in_embedding_group():
        return
    group = parallel_state.get_embedding_group()
    first, last = chunks[0], chunks[-1]
    if first.pre_process:
        weight = first.embedding.word_embeddings.weight.detach()
    else:
        weight = torch.empty_like(last.output_layer.weight, requires_grad=False)
        last.embedding_elsewhere.weight = weight
    dist.broadcast(weight, group=group, group_src=0)


def drop_embedding(chunks: Sequence[Any]) -> None:
    if chunks[-1].embedding_elsewhere is not None:
        chunks[-1].embedding_elsewhere.weight = None


class MTPLayers(MegatronModule):
    """The layers, under the names `layers.0`, ..."""

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, count: int, vp_stage: int | None = None
    ) -> None:
        super().__init__(config=config)
        provider = PackedLayers(architecture)
        spec = get_mtp_layer_spec_for_backend(
            layer_spec(config, provider, experts=config.num_moe_experts is not None), provider
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.layers = nn.ModuleList(
            MultiTokenPredictionLayer(
                config=config,
                submodules=spec.submodules,
                layer_number=number + 1,
                vp_stage=vp_stage,
                pg_collection=groups,
            )
            for number in range(count)
        )
        for layer in self.layers:
            router = getattr(layer.transformer_layer.mlp, "router", None)
            if router is not None:
                # Megatron's record of auxiliary losses has no entry for it.
                router.layer_number = None

    def forward(self, hidden: Tensor, embeddings: list[Tensor], **attention: Any) -> list[Tensor]:
        """(N, 1, H) of the model and of each layer's tokens, to (N, 1, H) of each layer."""
        found = []
        for layer, embedding in zip(self.layers, embeddings, strict=True):
            hidden = layer._proj_and_transformer_layer(
                hidden_states=hidden, decoder_input=embedding, attention_mask=None, **attention
            )
            found.append(hidden)
        return found

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, layer in enumerate(self.layers):
            found |= layer.sharded_state_dict(f"{prefix}layers.{number}.", sharded_offsets, metadata)
        return found
