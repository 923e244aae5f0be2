"""Prepares a micro-batch for this rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from slime_core.errors import ModelError
from slime_core.types.microbatch import MicroBatch
from slime_fsdp.attention import AttentionPlan, plan_attention
from slime_fsdp.config import FsdpConfig
from slime_fsdp.prefix_sharing import share_prompts
from slime_fsdp.stream_padding import padded
from slime_fsdp.trainer import Trainer
from slime_fsdp.vision import held_images, rope_positions
from slime_training.attention_runs import long_on
from slime_training.context_parallel import split_micro_batch
from slime_training.delta_rule import plan_recurrence
from slime_training.segment_table import whole_sequences, zigzag_part


def prepare(
    trainer: Trainer, config: FsdpConfig, micro: MicroBatch, *, share: bool = True
) -> tuple[MicroBatch, AttentionPlan]:
    """Returns this rank's part, on the device, with the plan that is built from its offsets on the host. share: prompts may be
    shared (`share_prompts`)."""
    placement, layout = trainer.placement, trainer.layout
    if trainer.model.sees_images:
        micro = replace(micro, position_ids=rope_positions(trainer.model.model, micro))
    elif micro.images is not None:
        raise ModelError(
            f"{trainer.folder.path}: backend fsdp does not support images of a {trainer.folder.config.model_type}."
        )
    recurrent = trainer.model.has_delta_nets
    shared = share_prompts(micro) if share and config.shares_prompts and not recurrent else None
    if shared is not None:
        micro, table = shared
    elif layout.cp_size > 1:
        micro = split_micro_batch(micro, layout.cp_rank, layout.cp_size)
        if micro.images is not None:
            micro = replace(micro, images=held_images(trainer.model.model, micro.images))
        table = zigzag_part(micro.cu_seqlens, layout.cp_rank, layout.cp_size)
    else:
        table = whole_sequences(micro.cu_seqlens)
    if config.fp8_recipe is not None:
        micro, table = padded(micro, table)
    plan = plan_attention(
        table,
        device=placement.device,
        varlen=placement.device.type == "cuda"
        and placement.compute_dtype == torch.bfloat16
        and not placement.true_on_policy,
        group=trainer.ranks.cp_group,
        batch_invariant=placement.true_on_policy,
        long=long_on(placement.device) if config.attn_implementation == "packed" else None,
    )
    if recurrent:
        plan = replace(plan, recurrence=plan_recurrence(table.query_lengths, placement.device))
    return micro.to(placement.device), plan
