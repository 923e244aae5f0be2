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
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from slime_core.errors import ModelError
from slime_training.attention_kernels import attend_packed, attend_short
from slime_training.attention_runs import Run, runs_of
from slime_training.batch_invariant.attention import attend as invariant_attention
from slime_training.delta_rule import RecurrencePlan
from slime_training.key_gather import gather_keys
from slime_training.rows import Take, TakeUnique, places_of, take
from slime_training.segment_table import Int64, SegmentTable

PACKED = "slime_packed"
"""Our name among transformers' attention implementations."""
UNSUPPORTED = ("softcap", "s_aux", "head_mask", "position_bias")

# Sequences share a block while the longest is at most this much longer than the shortest. One SDPA call costs about
# as much as this many padded tokens.
MAX_STRETCH = 1.25
FREE_TOKENS = 8
# Scores per segment and head up to which a CPU computes masked attention by its formula: SDPA's kernel for masks calls
# tiny matrix products one by one and gains nothing from threads (measured 21 against 4 ms for 768 segments of 11 x 19).
SHORT_SCORES = 2048


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Segments of like length, padded to one rectangle."""

    num_segments: int
    query_length: int
    key_length: int
    last_key: Tensor
    """(S or 1, Lq) int64: the last key that each query sees."""
    mask: Tensor | None
    """(S or 1, 1, Lq, Lk) bool, the keys in sight without a window. None: every segment has as many keys as queries, so
    that a plain causal mask does, padding at the right end included."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """How one micro-batch's tokens attend; made once, used by all layers."""

    runs: tuple[Run, ...]
    """For the kernels of GPUs; one of everything if blocks or another implementation of attention are used."""
    blocks: tuple[Block, ...] = ()
    """Empty: the kernels of GPUs are used."""
    query_rows: Tensor | None = None
    """(sum S Lq,) int64: the query that fills each place of the blocks; None: the stream already is one block."""
    query_places: Tensor | None = None
    """(N,) int64: the place of each query in the blocks."""
    key_rows: Tensor | None = None
    """int64: the key that fills each place of the blocks or of the kernels' stream; None: as `query_rows`."""
    key_places: Tensor | None = None
    """int64: `places_of` the kernels' stream, if it repeats keys only a few times."""
    group: dist.ProcessGroup | None = None
    """Context parallel group to gather keys and values from."""
    invariant: bool = False
    """What comes out for a token does not depend on the blocks, to the bit."""
    recurrence: RecurrencePlan | None = None
    """Of linear attention, if the model has any."""


def plan_attention(
    table: SegmentTable,
    *,
    device: torch.device,
    varlen: bool,
    group: dist.ProcessGroup | None = None,
    invariant: bool = False,
    long: int | None = None,
) -> AttentionPlan:
    """`varlen`: for the kernels of GPUs. `group`: the context parallel group that holds the keys. `long`: see `runs_of`."""
    query_lengths, key_lengths = table.query_lengths, table.key_lengths
    common: dict[str, Any] = {
        "runs": runs_of(query_lengths, key_lengths, device, long=long if varlen else None),
        "group": group,
        "invariant": invariant,
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
        query_rows.append(runs(table.query_starts[members], query_lengths[members], np.full(len(members), wide)))
        if table.key_rows is not None:
            places = runs(key_starts[members], key_lengths[members], np.full(len(members), deep))
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
    # The last query of a segment stands at its last key; where all are as far behind, one row serves all segments.
    behind = key_lengths - query_lengths
    behind = behind[:1] if (behind == behind[0]).all() else behind
    # The clamp keeps a key in sight of every padded query: a row without any would be NaN, in the backward too.
    last_key = torch.from_numpy(np.minimum(behind[:, None] + np.arange(wide), deep - 1)).to(device)
    mask = None if not behind.any() else keys_in_sight(last_key, deep)
    return Block(num_segments=len(query_lengths), query_length=wide, key_length=deep, last_key=last_key, mask=mask)


def keys_in_sight(last_key: Tensor, key_length: int, window: int | None = None) -> Tensor:
    """(S or 1, Lq) to (S or 1, 1, Lq, Lk) bool."""
    last = last_key[:, None, :, None]
    key = torch.arange(key_length, device=last_key.device)
    return key <= last if window is None else (key <= last) & (key > last - window)


def block_cuts(query_lengths: np.ndarray, key_lengths: np.ndarray, square: np.ndarray) -> list[int]:
    """Where to cut segments, longest first, so that no block wastes much on padding or mixes the two kinds of mask."""
    cuts, longest, deepest = [], query_lengths[0], key_lengths[0]
    # Lengths repeat: looking only where they change keeps this short for thousands of sequences.
    changes = np.flatnonzero((np.diff(query_lengths) != 0) | (np.diff(key_lengths) != 0)) + 1
    for i in changes:
        apart = far_apart(longest, query_lengths[i]) or far_apart(deepest, key_lengths[i])
        if apart or square[i] != square[i - 1]:
            cuts.append(int(i))
            longest, deepest = query_lengths[i], key_lengths[i]
    return cuts


def far_apart(one: float, other: float) -> bool:
    return max(one, other) > min(one, other) * MAX_STRETCH + FREE_TOKENS


def runs(starts: Int64, lengths: Int64, padded: Int64) -> Int64:
    """starts[i], starts[i] + 1, …, the last of `lengths[i]` repeated until there are `padded[i]` of them."""
    before = np.cumsum(padded) - padded
    offset = np.arange(int(padded.sum())) - np.repeat(before, padded)
    return np.repeat(starts, padded) + np.minimum(offset, np.repeat(lengths - 1, padded))


# Compiled layers stop here: a graph would be specialised to each micro-batch's plan.
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
    """transformers' attention signature: query (1, H, N, D), key and value (1, K, N, D); gives (1, N, H, D).

    `attention_plan` came down from the model's own call. Dropout is never applied.
    """
    if attention_plan is None:
        raise ModelError(f"{type(module).__name__} keeps keyword arguments from its attention: it cannot be packed.")
    if asked := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise ModelError(f"{type(module).__name__} asks for {', '.join(asked)}: packed attention does not compute it.")
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
            k, v = Take.apply(k, plan.key_rows), Take.apply(v, plan.key_rows)
    queries = q.split([block.num_segments * block.query_length for block in plan.blocks])
    sizes = [block.num_segments * block.key_length for block in plan.blocks]
    attend = attend_block_invariant if plan.invariant else attend_block
    outputs = [
        attend(*parts, block, scaling, sliding_window)
        for *parts, block in zip(queries, k.split(sizes), v.split(sizes), plan.blocks, strict=True)
    ]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if plan.query_rows is not None and plan.query_places is not None:
        out = TakeUnique.apply(out, plan.query_places)
    return out


def rectangles(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """(S Lq, H, D), (S Lk, K, D), (S Lk, K, D') to (S, H, Lq, D), (S, K, Lk, D), (S, K, Lk, D')."""
    return (
        q.unflatten(0, (block.num_segments, block.query_length)).transpose(1, 2),
        k.unflatten(0, (block.num_segments, block.key_length)).transpose(1, 2),
        v.unflatten(0, (block.num_segments, block.key_length)).transpose(1, 2),
    )


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, block: Block, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """(S Lq, H, D), (S Lk, K, D), (S Lk, K, D') to (S Lq, H, D')."""
    q, k, v = rectangles(q, k, v, block)
    mask = block.mask
    if sliding_window is not None and sliding_window < block.key_length:
        mask = keys_in_sight(block.last_key, block.key_length, sliding_window)
    if mask is not None and not q.is_cuda and block.query_length * block.key_length <= SHORT_SCORES:
        return attend_short(q, k, v, mask, scaling).transpose(1, 2).flatten(0, 1)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


def attend_block_invariant(
    q: Tensor, k: Tensor, v: Tensor, block: Block, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """As `attend_block`."""
    q, k, v = rectangles(q, k, v, block)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return invariant_attention(q, k, v, block.last_key, scale, sliding_window).transpose(1, 2).flatten(0, 1)


class Pad(torch.autograd.Function):
    """Rows into the places of the blocks. Padding repeats a row that exists; nothing reads what comes of it, so its
    gradient is zero and the backward is a plain selection (no atomic adds: the same bits every time)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


AttentionInterface.register(PACKED, packed_attention)
