"""Attention over packed sequences: no padding in the stream, no dense mask, no token sees another sequence.

On GPUs in half precision kernels take the stream as it is; elsewhere sequences of like length are padded into blocks,
one SDPA call each. Under context parallelism keys and values are gathered over the group first.

Legend: N tokens this rank holds, M keys visible to it (N without context parallelism), H query heads, K key heads,
D head dim, S segments (see SegmentTable), Lq and Lk padded lengths in a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface

from slime_core.errors import ModelError
from slime_training.attention_blocks import Rectangle, far_apart, padded_rows
from slime_training.attention_kernels import attend_packed
from slime_training.attention_runs import Run, runs_of
from slime_training.attention_variants import variants_asked
from slime_training.batch_invariant.attention import attend as invariant_attention
from slime_training.delta_rule import RecurrencePlan
from slime_training.deterministic_gather import DeterministicGather, GatherUnique, places_of, take
from slime_training.key_gather import gather_keys
from slime_training.segment_table import SegmentTable

PACKED = "slime_packed"
"""slime's name among transformers' attention implementations."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Block(Rectangle):
    """Segments of similar length in one rectangle, and which keys their queries see."""

    last_key: Tensor
    """(S or 1, Lq) int64: the last key that each query sees."""
    mask: Tensor | None
    """(S or 1, 1, Lq, Lk) bool: the keys that each query sees, without a window. None: every segment has as many keys as
    queries, so that a plain causal mask is enough, with padding at the end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """How the tokens of one micro-batch attend; built once, used by all layers."""

    runs: tuple[Run, ...]
    """Runs for the GPU kernels; one run of everything for blocks or another implementation of attention."""
    blocks: tuple[Block, ...] = ()
    """Empty: the GPU kernels are used."""
    query_rows: Tensor | None = None
    """(sum S Lq,) int64: the query at each place of the blocks; None: the stream is one block."""
    query_places: Tensor | None = None
    """(N,) int64: the place of each query in the blocks."""
    key_rows: Tensor | None = None
    """int64: the key at each place of the blocks or of the kernels' stream; None: the same as `query_rows`."""
    key_places: Tensor | None = None
    """int64: `places_of` for the kernels' stream, if it repeats keys only a few times."""
    group: dist.ProcessGroup | None = None
    """Context-parallel group to gather keys and values from."""
    batch_invariant: bool = False
    """The result of a token does not depend on the blocks, bit for bit."""
    recurrence: RecurrencePlan | None = None
    """Plan of linear attention, if the model has any."""


def plan_attention(
    table: SegmentTable,
    *,
    device: torch.device,
    varlen: bool,
    group: dist.ProcessGroup | None = None,
    batch_invariant: bool = False,
    long: int | None = None,
) -> AttentionPlan:
    """`varlen`: plan for the GPU kernels. `group`: the context-parallel group that holds the keys. `long`: see `runs_of`."""
    query_lengths, key_lengths = table.query_lengths, table.key_lengths
    common: dict[str, Any] = {
        "runs": runs_of(query_lengths, key_lengths, device, long=long if varlen else None),
        "group": group,
        "batch_invariant": batch_invariant,
    }
    if varlen:
        if table.key_rows is None:
            return AttentionPlan(**common)
        places = places_of(table.key_rows)
        return AttentionPlan(
            **common,
            key_rows=torch.from_numpy(table.key_rows).to(device),
            key_places=None if places is None else torch.from_numpy(places).to(device),
        )

    square, key_starts = table.square, table.key_starts()
    order = np.lexsort((-query_lengths, ~square))
    cuts = block_cuts(query_lengths[order], key_lengths[order], square[order])
    blocks, query_rows, key_rows = [], [], []
    for members in np.split(order, cuts):
        wide, deep = int(query_lengths[members].max()), int(key_lengths[members].max())
        blocks.append(make_block(query_lengths[members], key_lengths[members], device))
        query_rows.append(padded_rows(table.query_starts[members], query_lengths[members], wide))
        if table.key_rows is not None:
            places = padded_rows(key_starts[members], key_lengths[members], deep)
            key_rows.append(table.key_rows[places])
    if len(blocks) == 1 and table.key_rows is None and (query_lengths == query_lengths[0]).all():
        return AttentionPlan(**common, blocks=tuple(blocks))
    rows = np.concatenate(query_rows)
    # Padding repeats a segment's last row, at a later place: written first, the real place wins.
    places = np.empty(int(query_lengths.sum()), np.int64)
    places[rows[::-1]] = np.arange(len(rows))[::-1]
    return AttentionPlan(
        **common,
        blocks=tuple(blocks),
        query_rows=torch.from_numpy(rows).to(device),
        query_places=torch.from_numpy(places).to(device),
        key_rows=None if table.key_rows is None else torch.from_numpy(np.concatenate(key_rows)).to(device),
    )


def make_block(query_lengths: np.ndarray, key_lengths: np.ndarray, device: torch.device) -> Block:
    wide, deep = int(query_lengths.max()), int(key_lengths.max())
    # The last query of a segment is at its last key; if all queries have the same distance, one row serves all segments.
    behind = key_lengths - query_lengths
    behind = behind[:1] if (behind == behind[0]).all() else behind
    # The clamp lets every padded query see a key: a row without any would be NaN, also in the backward.
    last_key = torch.from_numpy(np.minimum(behind[:, None] + np.arange(wide), deep - 1)).to(device)
    mask = None if not behind.any() else keys_in_sight(last_key, deep)
    return Block(num_segments=len(query_lengths), query_length=wide, key_length=deep, last_key=last_key, mask=mask)


def keys_in_sight(last_key: Tensor, key_length: int, window: int | None = None) -> Tensor:
    """(S or 1, Lq) to (S or 1, 1, Lq, Lk) bool."""
    last = last_key[:, None, :, None]
    key = torch.arange(key_length, device=last_key.device)
    return key <= last if window is None else (key <= last) & (key > last - window)


def block_cuts(query_lengths: np.ndarray, key_lengths: np.ndarray, square: np.ndarray) -> list[int]:
    """Where to cut segments, sorted by length, so that no block wastes much on padding or mixes the two kinds of mask."""
    cuts, longest, deepest = [], query_lengths[0], key_lengths[0]
    # Lengths repeat: checking only where they change keeps this fast for thousands of sequences.
    changes = np.flatnonzero((np.diff(query_lengths) != 0) | (np.diff(key_lengths) != 0)) + 1
    for i in changes:
        apart = far_apart(longest, query_lengths[i]) or far_apart(deepest, key_lengths[i])
        if apart or square[i] != square[i - 1]:
            cuts.append(int(i))
            longest, deepest = query_lengths[i], key_lengths[i]
    return cuts


# Excluded from compiled layers: a graph would be specialized to each micro-batch's plan.
@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query (1, H, N, D), key and value (1, K, N, D); returns (1, N, H, D).

    `attention_plan` came down from the model's own call. Dropout is never applied.
    """
    if attention_plan is None:
        raise ModelError(f"{type(module).__name__} keeps keyword arguments from its attention: it cannot be packed.")
    if asked := variants_asked(kwargs):
        raise ModelError(f"{type(module).__name__} requires {', '.join(asked)}: packed attention does not compute it.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if attention_plan.group is not None:
        k, v = gather_keys(k, v, attention_plan.group)
    attend = attend_blocks if attention_plan.blocks else attend_runs
    return attend(q, k, v, attention_plan, scaling, sliding_window)[None], None


def attend_runs(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """(N, H, D), (M, K, D), (M, K, D') to (N, H, D')."""
    if plan.key_rows is not None:
        k, v = (take(x, plan.key_rows, plan.key_places) for x in (k, v))
    return attend_packed(q, k, v, plan.runs, scale=scaling, left=-1 if sliding_window is None else sliding_window - 1)


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """(N, H, D), (M, K, D), (M, K, D') to (N, H, D')."""
    if plan.query_rows is not None and plan.query_places is not None:
        q = Pad.apply(q, plan.query_rows, plan.query_places)
        if plan.key_rows is None:
            k = Pad.apply(k, plan.query_rows, plan.query_places)
            v = Pad.apply(v, plan.query_rows, plan.query_places)
        else:
            k, v = DeterministicGather.apply(k, plan.key_rows), DeterministicGather.apply(v, plan.key_rows)
    queries = q.split([block.num_segments * block.query_length for block in plan.blocks])
    sizes = [block.num_segments * block.key_length for block in plan.blocks]
    attend = attend_block_invariant if plan.batch_invariant else attend_block
    outputs = [
        attend(*parts, block, scaling, sliding_window)
        for *parts, block in zip(queries, k.split(sizes), v.split(sizes), plan.blocks, strict=True)
    ]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if plan.query_rows is not None and plan.query_places is not None:
        out = GatherUnique.apply(out, plan.query_places)
    return out


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, block: Block, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """(S Lq, H, D), (S Lk, K, D), (S Lk, K, D') to (S Lq, H, D')."""
    mask = block.mask
    if sliding_window is not None and sliding_window < block.key_length:
        mask = keys_in_sight(block.last_key, block.key_length, sliding_window)
    return block.attend(q, k, v, mask, scaling)


def attend_block_invariant(
    q: Tensor, k: Tensor, v: Tensor, block: Block, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """`attend_block` with batch-invariant kernels."""
    q, k, v = block.shaped(q, k, v)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return invariant_attention(q, k, v, block.last_key, scale, sliding_window).transpose(1, 2).flatten(0, 1)


class Pad(torch.autograd.Function):
    """Gathers rows into the places of the blocks. Padding repeats an existing row, and its result is not read, so its gradient
    is zero and the backward is a plain selection (no atomic adds: bitwise reproducible)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


AttentionInterface.register(PACKED, packed_attention)
