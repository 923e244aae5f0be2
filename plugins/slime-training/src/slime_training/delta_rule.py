"""Gated delta nets over packed sequences: the short convolution and the recurrence, each of which starts anew with every
sequence (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464).

Of one head, with k and q of length one, decay exp(g) <= 1 and strength b:

    S_t = exp(g_t) S_{t-1} + b_t k_t (v_t - exp(g_t) S'_{t-1} k_t)',    o_t = S'_t q_t / sqrt(D)

Legend: N tokens of a stream, Z chunks of C tokens, H heads of values, K of keys (each serves H / K of values), D and D' their
dims, F features, W taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

CHUNK: Final = 64
"""Most tokens whose contributions are computed by matrix products; states are passed from chunk to chunk."""
EPSILON: Final = 1e-6
"""Added to the squared length of keys and queries before they are normalized."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrencePlan:
    """Sequences of one stream, cut into chunks: the first of every sequence, longest sequence first, then the second of those
    that have one, and so on. So the states after one step are the first states of the next."""

    offsets: Tensor
    """(S + 1,) int64: where sequences start."""
    positions: Tensor
    """(N,) int64: each token's place in its sequence."""
    places: Tensor
    """(N,) int64: each token's row in the chunks, concatenated."""
    counts: tuple[int, ...]
    """Number of sequences that have a first chunk, a second, ..."""
    chunk: int


def plan_recurrence(lengths: npt.NDArray[np.int64], device: torch.device, chunk: int = CHUNK) -> RecurrencePlan:
    """Plans the chunks. `lengths` (S,): tokens of the consecutive sequences in the stream."""
    lengths = lengths[lengths > 0]
    chunk = min(chunk, int(lengths.max(initial=1)))
    order = np.argsort(-lengths, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    chunks = -(-lengths // chunk)
    counts = (chunks[:, None] > np.arange(chunks.max(initial=0))).sum(0)
    first = np.cumsum(counts) - counts
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    number = first[positions // chunk] + np.repeat(rank, lengths)
    return RecurrencePlan(
        offsets=torch.from_numpy(np.concatenate([starts, [lengths.sum()]])).to(device),
        positions=torch.from_numpy(positions).to(device),
        places=torch.from_numpy(number * chunk + positions % chunk).to(device),
        counts=tuple(int(count) for count in counts),
        chunk=chunk,
    )


def causal_conv(x: Tensor, weight: Tensor, plan: RecurrencePlan) -> Tensor:
    """(N, F), (F, W) to (N, F): for each feature the weighted sum over a token and the W - 1 before it in its sequence, through
    SiLU."""
    taps = weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) * weight[:, -1]
    for back in range(1, taps):
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)].where((plan.positions >= back)[:, None], 0.0)
        total = total + earlier.to(wide) * weight[:, taps - 1 - back]
    return F.silu(total).to(x.dtype)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, plan: RecurrencePlan) -> Tensor:
    """(N, K, D), (N, K, D), (N, H, D'), (N, H) g in float32, (N, H) b to (N, H, D').

    In half precision on a GPU by the package fla where it is installed; else in chunks, in float32 or wider.
    """
    repeats = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (q, k))
    if q.is_cuda and q.dtype != torch.float32 and (kernel := fused_kernel()) is not None:
        out, _ = kernel(
            *(x[None].contiguous() for x in (q, k, v, decay, strength)),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=plan.offsets,
        )
        found: Tensor = out[0]
        return found
    return in_chunks(q, k, v, decay, strength, plan)


@cache
def fused_kernel() -> Callable[..., Any] | None:
    """Returns fla's kernel; None if fla is not installed, or its backward would refuse. Triton from 3.4 to 3.7.0 computes it
    wrongly on Hopper, which fla avoids with tilelang (https://github.com/fla-org/flash-linear-attention/issues/640)."""
    if find_spec("fla") is None:
        return None
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    if on_hopper and Version("3.4") <= Version(version("triton")) < Version("3.7.1") and find_spec("tilelang") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    kernel: Callable[..., Any] = chunk_gated_delta_rule
    return kernel


def in_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, plan: RecurrencePlan) -> Tensor:
    """`gated_delta_rule` with as many heads of keys as of values. Section 3.3 of the paper: within a chunk, what each token
    writes is the solution of a triangular system."""
    dtype = v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k = (unit_length(x.to(wide)) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    (q, k, v), (g, b) = (
        [chunked(x.to(wide), plan) for x in (q, k, v)],
        [chunked(x.to(wide)[..., None], plan)[..., 0] for x in (decay, strength)],
    )
    since = g.cumsum(-1)
    later = torch.ones(plan.chunk, plan.chunk, dtype=torch.bool, device=v.device).triu(1)
    # Masked before exp, which could overflow there.
    kept = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    strong = k * b[..., None]
    overlaps = (strong @ k.mT) * kept
    requested = torch.cat([v * b[..., None], strong * since.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(overlaps, requested, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.mT) * kept
    reach = q * since.exp()[..., None]
    whole = since[..., -1:]
    handed = k * (whole - since).exp()[..., None]
    state = v.new_zeros(plan.counts[0] if plan.counts else 0, v.shape[1], k.shape[-1], v.shape[-1])
    outputs, first = [], 0
    for count in plan.counts:
        part = slice(first, first + count)
        state = state[:count]
        written = values[part] - keys[part] @ state
        outputs.append(reach[part] @ state + scores[part] @ written)
        state = state * whole[part, ..., None].exp() + handed[part].mT @ written
        first += count
    out = torch.cat(outputs) if outputs else values
    out = out.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, plan.places)
    return out.reshape(len(out), v.shape[1], v.shape[-1]).to(dtype)


def unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def chunked(x: Tensor, plan: RecurrencePlan) -> Tensor:
    """(N, H, D) to (Z, H, C, D), zero where a chunk has no token."""
    places = x.new_zeros(sum(plan.counts) * plan.chunk, *x.shape[1:]).index_copy(0, plan.places, x)
    return places.reshape(-1, plan.chunk, *x.shape[1:]).transpose(1, 2)
