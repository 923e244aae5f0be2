"""The work of a micro-batch, as this rank's part of it asks for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from slime_core.types.microbatch import MicroBatch
from slime_megatron.attention import padded_positions, plan_attention, with_padding
from slime_megatron.delta_net import plan_delta
from slime_megatron.prediction import ahead_of
from slime_megatron.routing import Routing
from slime_megatron.trainer import Trainer
from slime_megatron.work import Work
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
) -> Work:
    """This rank's part, on the device, with the plan that is made from its offsets on the host. `ahead`: layers of
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
    # The variable-length kernel knows no choice of keys.
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
    stands_for_none = torch.zeros(held, dtype=torch.bool)
    if layout.cp_size > 1:
        stands_for_none = padded_positions(whole.cu_seqlens, micro.cu_seqlens, layout.cp_rank, layout.cp_size)
    stands_for_none = nn.functional.pad(stands_for_none, (0, padding), value=True)[None]
    return Work(
        micro=replace(micro, routed_experts=None).to(device),
        tokens=tokens,
        plan=plan,
        delta=delta,
        padding=stands_for_none.to(device),
        entropy=entropy,
        ahead=tuple(
            ahead_of(whole, depth, layout.cp_rank, layout.cp_size, padding).to(device)
            for depth in range(1, 1 + (trainer.num_ahead if ahead else 0))
        ),
        experts=() if replayed is None else replayed.ids_of(micro),
    )
