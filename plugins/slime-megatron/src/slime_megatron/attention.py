"""Packed attention for Megatron's layers: no token sees another sequence, no dense mask over the stream.

The kernels of GPUs in half precision; elsewhere sequences of like length are padded into blocks, one SDPA
call each. Under context parallelism keys and values are gathered over the group first.

Legend: N tokens this rank holds, M keys that it may read, H query heads, K key heads, D head dim, S segments (see
SegmentTable), Lq and Lk padded lengths in a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime_core.errors import ModelError
from slime_megatron.delta_net import DeltaPlan
from slime_megatron.rope import RotaryCache
from slime_training.attention_blocks import Rectangle, far_apart, padded_rows
from slime_training.attention_kernels import attend_packed
from slime_training.attention_runs import Run, long_on, runs_of
from slime_training.context_parallel import held_positions
from slime_training.deterministic_gather import DeterministicGather, places_of, take
from slime_training.key_gather import gather_keys
from slime_training.segment_table import Int64, SegmentTable


@dataclass(frozen=True, kw_only=True, eq=False)
class Block(Rectangle):
    """And where its queries and keys stand in the stream."""

    query_rows: Tensor
    """(S Lq,) int64: the query at each place; padding repeats a segment's last one."""
    key_rows: Tensor
    """(S Lk,) int64"""
    mask: Tensor
    """(S, 1, Lq, Lk) bool: the keys that each query sees."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """How the tokens of one micro-batch attend; built once, used by all layers."""

    position_ids: Tensor
    """(N,) int64, positions of the tokens that this rank holds."""
    blocks: tuple[Block, ...] = ()
    """Empty: the GPU kernels are used."""
    query_places: Tensor | None = None
    """(N,) int64: the place of each query in the concatenated blocks."""
    runs: tuple[Run, ...] = ()
    """Runs for the GPU kernels."""
    key_rows: Tensor | None = None
    """int64: rows of the kernels' keys; None: the keys are the stream."""
    key_places: Tensor | None = None
    """int64: `places_of` for `key_rows`."""
    group: dist.ProcessGroup | None = None
    """Context-parallel group to gather keys and values from."""


@dataclass
class PackedPlan(PackedSeqParams):
    """Megatron passes `packed_seq_params` down to attention and delta nets; this subclass holds the plans."""

    plan: AttentionPlan = field(default=None)  # type: ignore[assignment]
    rotation: RotaryCache = field(default=None)  # type: ignore[assignment]
    delta: DeltaPlan | None = None
    chosen: dict[int, list[Tensor]] = field(default_factory=dict)
    """Keys: the number of a layer that chooses keys. Values: (S, 1, Lq, Lk) bool for each block; kept for layers that use its
    choice, and for recomputation."""


def padded_positions(cu_seqlens: Tensor, padded: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """(N,) bool: which tokens of a rank's zigzag part are padding of sequences. `padded`: offsets of the padded sequences."""
    held = held_positions(padded, cp_rank, cp_size)
    sequence = torch.searchsorted(padded[1:].long(), held, right=True)
    return held - padded[:-1].long()[sequence] >= cu_seqlens.long().diff()[sequence]


def with_padding(table: SegmentTable, padding: int, stride: int) -> SegmentTable:
    """Adds `padding` tokens at the end of every rank's part, as a sequence of their own. `stride`: this rank's tokens before,
    as many as on every other rank of the group."""
    if padding == 0:
        return table
    lengths = np.array([padding])
    rows = table.key_rows
    if rows is not None:
        rows = rows + padding * (rows // stride)
        rows = np.concatenate([rows, stride + np.arange(padding)])
    return SegmentTable(
        query_starts=np.append(table.query_starts, stride),
        query_lengths=np.concatenate([table.query_lengths, lengths]),
        key_lengths=np.concatenate([table.key_lengths, lengths]),
        key_rows=rows,
    )


def plan_attention(
    table: SegmentTable,
    position_ids: Tensor,
    *,
    device: torch.device,
    varlen: bool,
    group: dist.ProcessGroup | None = None,
) -> AttentionPlan:
    """`varlen`: plan for the GPU kernels. `group`: the context-parallel group that holds the keys."""
    query_lengths, key_lengths = table.query_lengths, table.key_lengths
    if varlen:
        rows = table.key_rows
        places = None if rows is None else places_of(rows)
        return AttentionPlan(
            position_ids=position_ids.to(device),
            runs=runs_of(query_lengths, key_lengths, device, long=long_on(device)),
            key_rows=None if rows is None else torch.from_numpy(rows).to(device),
            key_places=None if places is None else torch.from_numpy(places).to(device),
            group=group,
        )
    key_starts = table.key_starts()
    blocks = []
    places = np.empty(int(query_lengths.sum()), np.int64)
    before = 0
    for members in like_lengths(query_lengths, key_lengths):
        wide, deep = int(query_lengths[members].max()), int(key_lengths[members].max())
        query_rows = padded_rows(table.query_starts[members], query_lengths[members], wide)
        key_rows = padded_rows(key_starts[members], key_lengths[members], deep)
        if table.key_rows is not None:
            key_rows = table.key_rows[key_rows]
        behind = key_lengths[members] - query_lengths[members]
        # A padded query sees the keys of the last one: a row without any key would be NaN, also in the backward.
        last_key = np.minimum(behind[:, None] + np.arange(wide), key_lengths[members][:, None] - 1)
        mask = np.arange(deep) <= last_key[:, :, None]
        real = np.arange(wide) < query_lengths[members][:, None]
        places[query_rows.reshape(-1, wide)[real]] = before + np.flatnonzero(real)
        before += len(query_rows)
        blocks.append(
            Block(
                num_segments=len(members),
                query_length=wide,
                key_length=deep,
                query_rows=torch.from_numpy(query_rows).to(device),
                key_rows=torch.from_numpy(key_rows).to(device),
                mask=torch.from_numpy(mask[:, None]).to(device),
            )
        )
    return AttentionPlan(
        position_ids=position_ids.to(device),
        blocks=tuple(blocks),
        query_places=torch.from_numpy(places).to(device),
        group=group,
    )


def like_lengths(query_lengths: Int64, key_lengths: Int64) -> list[Int64]:
    """Indices of segments, sorted by length, and split where padding would waste much."""
    order = np.lexsort((-query_lengths, -key_lengths))
    groups: list[list[int]] = []
    for segment in order:
        first = groups[-1][0] if groups else None
        if first is None or any(
            far_apart(lengths[first], lengths[segment]) for lengths in (query_lengths, key_lengths)
        ):
            groups.append([])
        groups[-1].append(int(segment))
    return [np.array(group) for group in groups]


class PackedAttention(nn.Module):
    """Megatron's core attention, called with the local heads. Queries and keys are rotated here, by one kernel on GPUs; those
    of latent attention are rotated before."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__()
        if config.window_size is not None:
            raise ModelError("the model has sliding windows in its attention: backend megatron does not compute them.")
        self.softmax_scale = softmax_scale
        self.rotates, self.interleaved = not config.multi_latent_attention, config.rotary_interleaved

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedPlan,
        **unused: Any,
    ) -> Tensor:
        """(N, 1, H, D) or (N, H, D) to (N, 1, H D) or (N, H D)."""
        plan = packed_seq_params.plan
        shape = query.shape[:-2]
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        if self.rotates:
            q, k = packed_seq_params.rotation.apply_rotary(q, k, interleaved=self.interleaved)
        if plan.group is not None:
            k, v = gather_keys(k, v, plan.group)
        return self.attend(q, k, v, plan).reshape(*shape, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """(N, H, D), (M, K, D), (M, K, D') to (N, H, D')."""
        attend = attend_blocks if plan.blocks else attend_runs
        return attend(q, k, v, plan, self.softmax_scale)


def attend_runs(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float | None) -> Tensor:
    """(N, H, D), (M, K, D), (M, K, D') to (N, H, D')."""
    if plan.key_rows is not None:
        k, v = (take(x, plan.key_rows, plan.key_places) for x in (k, v))
    return attend_packed(q, k, v, plan.runs, scale=scale)


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    scale: float | None,
    masks: Sequence[Tensor] | None = None,
) -> Tensor:
    """(N, H, D), (M, K, D), (M, K, D') to (N, H, D'). `masks`: replace the blocks' own."""
    outputs = [
        block.attend(
            DeterministicGather.apply(q, block.query_rows),
            DeterministicGather.apply(k, block.key_rows),
            DeterministicGather.apply(v, block.key_rows),
            block.mask if masks is None else masks[number],
            scale,
        )
        for number, block in enumerate(plan.blocks)
    ]
    return torch.cat(outputs).index_select(0, plan.query_places)
