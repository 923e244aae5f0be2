"""The kernel's objective over micro-batches, shards and context-parallel ranks, with everything added up.

Legend: M response tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from slime_core.algorithm.loss import TokenObjective
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.loss import LossInputs, Segments
from slime_core.contracts.needs import Need
from slime_core.types.batch import Batch, Float64, Int64, TokenColumns
from slime_core.types.microbatch import MicroBatch
from slime_plugin_kit.batches import Policy
from slime_plugin_kit.ranks import as_ranks
from slime_training.context_parallel import split_micro_batch
from slime_training.segments import LocalSegments

EVERY_NEED: Final = frozenset(Need)
Micros = Sequence[Sequence[int]]
Leaves = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """One step's loss, metrics and gradients, summed over its micro-batches and ranks."""

    loss: float
    sums: Mapping[str, float]
    gradient: Mapping[str, Float64]
    """By log_probs and entropy, or by values: (M,) each."""


def leaves_of(policy: Policy, objective: TokenObjective, dtype: torch.dtype) -> Leaves:
    names = ("values",) if objective.reads_values else ("log_probs", "entropy")
    return {name: torch.tensor(getattr(policy, name), dtype=dtype, requires_grad=True) for name in names}


def train(
    objective: TokenObjective,
    batch: Batch,
    columns: TokenColumns,
    policy: Policy,
    micros: Micros,
    *,
    dtype: torch.dtype = torch.float64,
    cp_size: int = 1,
) -> Trained:
    """Forward and backward of every micro-batch, as a backend does it."""
    parts = as_ranks(
        cp_size,
        lambda rank, segments: train_rank(objective, batch, columns, policy, micros, dtype, rank, cp_size, segments),
    )
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    names = parts[0].gradient
    return Trained(
        loss=sum(part.loss for part in parts),
        sums=sums,
        gradient={name: np.sum([part.gradient[name] for part in parts], axis=0) for name in names},
    )


def train_rank(
    objective: TokenObjective,
    batch: Batch,
    columns: TokenColumns,
    policy: Policy,
    micros: Micros,
    dtype: torch.dtype,
    cp_rank: int,
    cp_size: int,
    segments_of: Callable[[MicroBatch], Segments],
) -> Trained:
    leaves = leaves_of(policy, objective, dtype)
    loss, sums = 0.0, dict[str, float]()
    for samples in micros:
        micro, rows = packed(batch, columns, np.array(samples, np.int64), cp_rank, cp_size)
        output = objective(micro, segments=segments_of(micro), **{name: leaf[rows] for name, leaf in leaves.items()})
        assert output.loss.requires_grad, "the loss of a micro-batch has no graph"
        output.loss.backward()  # type: ignore[no-untyped-call]
        loss += float(output.loss.detach())
        for name, value in output.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
    zeros = torch.zeros(len(batch.mask), dtype=dtype)
    gradient = {name: (zeros if leaf.grad is None else leaf.grad).double().numpy() for name, leaf in leaves.items()}
    return Trained(loss=loss, sums=sums, gradient=gradient)


def packed(
    batch: Batch, columns: TokenColumns, samples: Int64, cp_rank: int = 0, cp_size: int = 1
) -> tuple[MicroBatch, Tensor]:
    """A rank's part of a micro-batch, and which rows of the batch's response tokens it holds."""
    micro = pack_micro_batch(batch, samples, columns=columns)
    rows = torch.from_numpy(batch.response_rows(samples))
    if cp_size == 1:
        return micro, rows
    part = split_micro_batch(micro, cp_rank, cp_size)
    assert part.rows is not None
    return part, rows[part.rows]


def everything_of(micro: MicroBatch, leaves: Mapping[str, Tensor]) -> LossInputs:
    """All that a loss could ask for."""
    columns = micro.columns
    return LossInputs(
        mask=micro.mask,
        advantages=columns.advantages,
        returns=columns.returns,
        old_log_probs=columns.old_log_probs,
        old_values=columns.values,
        ref_log_probs=columns.ref_log_probs,
        rollout_log_probs=columns.rollout_log_probs,
        teacher_log_probs=columns.teacher_log_probs,
        **leaves,
    )


def loss_of(
    objective: TokenObjective, batch: Batch, columns: TokenColumns, policy: Policy, name: str
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The step's loss as a function of one of the policy's columns, and the current value of that column."""
    micro, _ = packed(batch, columns, np.arange(batch.num_samples))
    leaves = leaves_of(policy, objective, torch.float64)

    def function(leaf: Tensor) -> Tensor:
        segments = LocalSegments(micro.segments, micro.num_samples)
        return objective(micro, segments=segments, **{**leaves, name: leaf}).loss

    return function, leaves[name].detach()
