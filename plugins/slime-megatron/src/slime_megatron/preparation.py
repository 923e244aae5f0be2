"""Prepares the inputs of a micro-batch for this rank's part of the model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from slime_core.types.microbatch import MicroBatch
from slime_megatron.attention import padded_positions, plan_attention, with_padding
from slime_megatron.delta_net import plan_delta
from slime_megatron.micro_batch_inputs import MicroBatchInputs
from slime_megatron.mtp import ahead_of
from slime_megatron.routing import Routing
from slime_megatron.sequence_balance import balances_sequences, sequences_of
from slime_megatron.trainer import Trainer
from slime_training.context_parallel import split_micro_batch
from slime_training.head import EntropyMode
from slime_training.segment_table import whole_sequences, zigzag_part


def prepare(
    trainer: Trainer,
    micro: MicroBatch,
    entropy: EntropyMode,
    replayed: Routing | None,
    *,
    ahead: bool = False,
) -> MicroBatchInputs:
    """Returns this rank's part, on the device, with the plan that is built from its offsets on the host. `ahead`: layers of
    multi-token prediction are trained, if there are any."""
    layout = trainer.layout
    device = trainer.placement.device
    whole = micro
    if layout.cp_size > 1:
        micro = split_micro_batch(micro, layout.cp_rank, layout.cp_size)
        table = zigzag_part(micro.cu_seqlens, layout.cp_rank, layout.cp_size)
    else:
        table = whole_sequences(micro.cu_seqlens)
    held = micro.num_tokens
    padding = -held % trainer.ranks.shape.tp if trainer.ranks.shape.sequence_parallel else 0
    chosen = trainer.config.dsa_indexer_topk
    # The variable-length kernel does not support chosen keys.
    dense = chosen is None or int(table.key_lengths.max()) <= chosen
    plan = plan_attention(
        with_padding(table, padding, held),
        nn.functional.pad(micro.position_ids, (0, padding)),
        device=device,
        varlen=device.type == "cuda" and trainer.placement.dtype != torch.float32 and dense,
        group=trainer.ranks.cp_group,
    )
    delta = None
    if trainer.config.linear_attention_freq is not None:
        delta = plan_delta(micro.cu_seqlens, padding, device=device, group=trainer.ranks.cp_group)
    tokens = nn.functional.pad(micro.tokens, (0, padding))[None].to(device)
    is_padding = torch.zeros(held, dtype=torch.bool)
    if layout.cp_size > 1:
        is_padding = padded_positions(whole.cu_seqlens, micro.cu_seqlens, layout.cp_rank, layout.cp_size)
    is_padding = nn.functional.pad(is_padding, (0, padding), value=True)
    sequences = None
    if balances_sequences(trainer.config):
        offsets = micro.cu_seqlens // layout.cp_size
        sequences = sequences_of(offsets, micro.num_samples, is_padding).to(device)
    return MicroBatchInputs(
        micro=replace(micro, routed_experts=None).to(device),
        tokens=tokens,
        plan=plan,
        delta=delta,
        padding=is_padding[None].to(device),
        sequences=sequences,
        entropy=entropy,
        ahead=tuple(
            ahead_of(whole, depth, layout.cp_rank, layout.cp_size, padding).to(device)
            for depth in range(1, 1 + (trainer.num_ahead if ahead else 0))
        ),
        experts=() if replayed is None else replayed.ids_of(micro),
    )
