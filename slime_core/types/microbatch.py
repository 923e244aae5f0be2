"""MicroBatch: some samples of one rank packed into one stream of tokens, as torch tensors, ready for a forward.

Legend: N packed tokens, S sequences, T response tokens whose log-probs are requested.
This module imports torch: only workers, losses and backends use it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LossColumns:
    """`TokenColumns` as torch tensors: float32 (T,); None: not needed."""

    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    correction: Tensor | None = None
    loss_weight: Tensor | None = None

    def map_rows(self, rows: Tensor | None, device: torch.device) -> LossColumns:
        """The columns at `rows` (None: all), on `device`."""
        columns = tensors_of(self)
        if rows is not None:
            columns = {name: column.index_select(0, rows) for name, column in columns.items()}
        return LossColumns(**moved(columns, device))


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroImages:
    """The distinct images of a micro-batch and the tokens of their features, in the layout of the Qwen-VL family: an image
    is a grid of patches, and a square of patches is a feature, the embedding of one image token."""

    pixel_values: Tensor
    """(patches, values of a patch) float32, image after image."""
    grid_thw: Tensor
    """(images, 3) int64: frames, rows and columns of patches."""
    feature_of_token: Tensor
    """(N,) int64: row of all images' features that replaces the token's embedding; -1: it keeps its own."""

    def to(self, device: torch.device) -> MicroImages:
        return MicroImages(**moved(tensors_of(self), device))


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """A packed stream; sequences follow each other without padding.

    A micro-batch without samples has one dummy token and T = 0, so that it runs forward and backward with zero gradient and
    every rank takes part in the same collectives. Under context parallelism each rank has its local part (`rows`).
    """

    tokens: Tensor
    """(N,) int64"""
    position_ids: Tensor
    """(N,) int64, restarting at 0 with each sequence."""
    cu_seqlens: Tensor
    """(S' + 1,) int32 offsets of the sequences in the stream; S' >= 1, counting a dummy and padding."""
    max_seqlen: int
    logit_index: Tensor
    """(T,) int64: positions in the stream whose logits predict a response token (P - 1 + t)."""
    targets: Tensor
    """(T,) int64: those response tokens."""
    segments: Tensor
    """(T,) int64 in [0, S): the sample of each response token."""
    num_samples: int
    """S, without a dummy."""
    mask: Tensor
    """(T,) bool: trained tokens."""
    columns: LossColumns
    temperature: float = 1.0
    """Logits are divided by it before the softmax."""
    rows: Tensor | None = None
    """(T,) int64 rows of the whole micro-batch's response axis that this rank holds; None: all of them."""
    images: MicroImages | None = None
    """None: no prompt in it has any."""
    samples: tuple[int, ...] = ()
    """(S,) sample numbers that are the same in every forward over a batch, however it is packed."""
    routed_experts: Tensor | None = None
    """(N, layers, top_k) integers: expert ids of the engine's forwards to replay; None: no replay."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> MicroBatch:
        images = None if self.images is None else self.images.to(device)
        tensors: dict[str, Any] = dict(moved(tensors_of(self), device))
        return replace(self, **tensors, columns=self.columns.map_rows(None, device), images=images)


def tensors_of(parts: LossColumns | MicroImages | MicroBatch) -> dict[str, Tensor]:
    """The fields that are tensors, by name."""
    return {name: value for name, value in vars(parts).items() if isinstance(value, Tensor)}


def moved(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
