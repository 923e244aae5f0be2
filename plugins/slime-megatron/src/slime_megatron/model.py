"""PackedGpt: Megatron's GPT on packed streams, with slime's head at its end.

Legend: N tokens that this rank holds, T response tokens among them, H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime_megatron.attention import PackedPlan
from slime_megatron.bridges.bridge import Architecture
from slime_megatron.expert_counts import count_without_padding
from slime_megatron.layers import block_spec
from slime_megatron.log_probs import log_probs_of
from slime_megatron.micro_batch_inputs import MicroBatchInputs
from slime_megatron.mtp import EmbeddingElsewhere, MTPLayers
from slime_megatron.rope import MLARotary, RotaryCache
from slime_megatron.sequence_balance import SequenceBalance, Sequences
from slime_megatron.token_permutation import order_tokens_here
from slime_training.deterministic_gather import GatherUnique
from slime_training.head import EntropyMode, chunk_positions


class ValueHead(nn.Module):
    """Linear head from hidden to one value, in float32."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        # Each tensor-parallel rank computes the whole gradient, after a gather.
        self.weight.sequence_parallel = self.bias.sequence_parallel = False  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())


class KeptRow(torch.autograd.Function):
    """The identity of a matrix, one row of which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, row: int) -> Tensor:
        ctx.row = row
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        grad[ctx.row] = 0.0
        return grad, None


class PackedGpt(GPTModel):
    """The last stage returns (K, T) float32: log-probs and, if requested, entropies; or values."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        *,
        head: str,
        chunk: int,
        device: torch.device,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        num_ahead: int = 0,
    ) -> None:
        """`num_ahead`: layers of multi-token prediction."""
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config, architecture, vp_stage),
            vocab_size=-(-architecture.vocab_size // tp_size) * tp_size,
            max_sequence_length=architecture.max_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=architecture.tied and head == "lm",
            position_embedding_type="none",
            vp_stage=vp_stage,
        )
        ahead: list[Any] = []
        self.embedding_elsewhere: EmbeddingElsewhere | None = None
        if num_ahead and post_process:
            self.mtp = MTPLayers(config, architecture, num_ahead, vp_stage)
            ahead = [layer.transformer_layer for layer in self.mtp.layers]
            if not pre_process:
                self.embedding_elsewhere = EmbeddingElsewhere(config, self.vocab_size, self.max_sequence_length)
        count_without_padding(self)
        self.sequence_balance = SequenceBalance(self)
        order_tokens_here(self, config)
        self.true_vocab_size = architecture.vocab_size
        self.padding = architecture.padding
        self.chunk = chunk
        self.rotary = replace(architecture.rotary, inv_freq=architecture.rotary.inv_freq.to(device))
        if architecture.mla:
            for layer in [*self.decoder.layers, *ahead]:
                layer.self_attention.rotary_pos_emb = MLARotary(self.rotary, config)
        self.value_head = None
        if post_process and head == "value":
            self.output_layer = None
            self.value_head = ValueHead(config)

    def setup_embeddings_and_output_layer(self) -> None:
        """Megatron also copies the embedding to the last stage here; the backend loads it from the folder on every stage."""
        if self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.post_process and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True
        if not self.share_embeddings_and_output_weights or self.pre_process == self.post_process:
            return
        weight = self.shared_embedding_or_output_weight()
        weight.shared_embedding = True
        # The second copy is excluded from the norm of gradients.
        weight.shared = self.post_process

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        if self.value_head is None:
            return dict(super().sharded_state_dict(prefix, sharded_offsets, metadata))
        # A critic has no language-model head, which Megatron's function for language models requires.
        return dict(MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata))

    def forward(self, work: MicroBatchInputs) -> Tensor | tuple[Tensor, Tensor]:
        layout = "thd" if self.config.multi_latent_attention else "sbhd"
        rotation = RotaryCache.at(work.plan.position_ids, self.rotary)
        self.sequence_balance.before(self.sequences(work), training=self.training)
        packed = PackedPlan(qkv_format=layout, plan=work.plan, rotation=rotation, delta=work.delta)
        output: Tensor | tuple[Tensor, Tensor] = super().forward(
            input_ids=work.tokens,
            position_ids=work.plan.position_ids[None],
            decoder_input=self.embedded(work) if self.pre_process else None,
            attention_mask=None,
            labels=work,
            packed_seq_params=packed,
            padding_mask=self.padding_mask(work),
        )
        return output

    def embedded(self, work: MicroBatchInputs) -> Tensor:
        """transformers does not train the padding token's embedding. If it is zero and a model samples the token, the following
        norm makes its gradient a thousand times larger than all others."""
        given = {"input_ids": work.tokens, "position_ids": work.plan.position_ids[None]}
        weight = self.embedding.word_embeddings.weight
        first = len(weight) * parallel_state.get_tensor_model_parallel_rank()
        kept = {}
        if self.padding is not None and 0 <= self.padding - first < len(weight):
            kept = {"word_embeddings.weight": KeptRow.apply(weight, self.padding - first)}
        found: Tensor = torch.func.functional_call(self.embedding, kept, kwargs=given)
        return found

    def padding_mask(self, work: MicroBatchInputs) -> Tensor | None:
        if self.config.num_moe_experts is None:
            return None
        if not self.config.sequence_parallel:
            return work.padding
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return work.padding.chunk(ranks, 1)[parallel_state.get_tensor_model_parallel_rank()]

    def sequences(self, work: MicroBatchInputs) -> Sequences | None:
        if work.sequences is None or not self.config.sequence_parallel:
            return work.sequences
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return work.sequences.part(parallel_state.get_tensor_model_parallel_rank(), ranks)

    def _postprocess(
        self,
        hidden_states: Tensor,
        labels: MicroBatchInputs,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`labels`: the argument of `forward`. With layers of multi-token prediction to train, also returns the sums of their
        cross-entropies (K,)."""
        if not self.post_process:
            return hidden_states
        work = labels
        if work.ahead:
            losses = self._predict(hidden_states.detach(), work, packed_seq_params=packed_seq_params)
            return self._scores(hidden_states, work), losses
        return self._scores(hidden_states, work)

    def _predict(self, hidden: Tensor, work: MicroBatchInputs, **attention: Any) -> Tensor:
        """(K,) float32"""
        embedding = self.embedding_elsewhere or self.embedding
        with torch.no_grad():
            positions = work.plan.position_ids[None]
            embeddings = [embedding(input_ids=ahead.tokens, position_ids=positions) for ahead in work.ahead]
        sums = []
        for found, ahead in zip(self.mtp(hidden, embeddings, **attention), work.ahead, strict=True):
            log_probs, _ = self._head(found, ahead.logit_index, ahead.targets, trained=False)
            sums.append(-log_probs.sum())
        return torch.stack(sums)

    def _head(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        targets: Tensor,
        *,
        trained: bool = True,
        temperature: float = 1.0,
        entropy: EntropyMode = "none",
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (T,) log-probs of the targets, and entropies. `trained`: the head's weight gets a gradient."""
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        first = len(weight) * parallel_state.get_tensor_model_parallel_rank()
        tp_group = parallel_state.get_tensor_model_parallel_group()
        return log_probs_of(
            GatherUnique.apply(hidden_states[:, 0], positions),
            (weight if trained else weight.detach())[: max(self.true_vocab_size - first, 0)],
            targets,
            first=first,
            group=tp_group if tp_group.size() > 1 else None,
            temperature=temperature,
            chunk=chunk_positions(len(weight), self.chunk),
            entropy=entropy,
        )

    def _scores(self, hidden_states: Tensor, work: MicroBatchInputs) -> Tensor:
        """(K, T)"""
        if self.value_head is not None:
            if self.config.sequence_parallel:
                hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
            values = self.value_head(GatherUnique.apply(hidden_states[:, 0], work.micro.logit_index))
            return values.t()
        log_probs, entropies = self._head(
            hidden_states,
            work.micro.logit_index,
            work.micro.targets,
            temperature=work.micro.temperature,
            entropy=work.entropy,
        )
        return torch.stack([log_probs] if entropies is None else [log_probs, entropies])
