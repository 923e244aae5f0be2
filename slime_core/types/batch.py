"""Batch: the accepted groups of a step as columns. TokenColumns: per-token log-probs, values, advantages and weights.

Ragged columns are flat arrays with separate lengths; S samples, N = sum T tokens, M = sum R response tokens.
Arrays may be read-only views of shared memory: never write to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from slime_core.types.batch_images import BatchImages
from slime_core.types.routed_experts import RoutedExperts

Int64: TypeAlias = npt.NDArray[np.int64]
Int32: TypeAlias = npt.NDArray[np.int32]
Float32: TypeAlias = npt.NDArray[np.float32]
Float64: TypeAlias = npt.NDArray[np.float64]
Bool: TypeAlias = npt.NDArray[np.bool_]
Number = TypeVar("Number", bound=np.generic)


def ragged_rows(lengths: npt.NDArray[np.integer], chosen: npt.NDArray[np.integer]) -> Int64:
    """Flat row numbers of the `chosen` segments of a ragged column, in the order of `chosen`.

    >>> ragged_rows(np.array([2, 0, 3]), np.array([2, 0]))
    array([2, 3, 4, 0, 1])
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    return ragged_positions((np.cumsum(lengths) - lengths)[chosen], lengths[chosen])


def ragged_positions(starts: Int64, lengths: Int64) -> Int64:
    """Concatenates the ranges [starts[i], starts[i] + lengths[i])."""
    before = np.cumsum(lengths) - lengths
    offsets: Int64 = np.repeat(starts - before, lengths)
    return np.arange(lengths.sum(), dtype=np.int64) + offsets


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Samples in submission order. `mask` is final: removed, aborted and failed samples are already 0 in it."""

    index: Int64
    """(S,) `Sample.index`; the next three are (S,) too."""
    group_index: Int64
    rollout_id: Int64
    credit_key: Int64
    """Samples with equal keys are normalized together."""
    reward: Float64
    """(S,) before shaping; NaN: no reward, and the sample is not in its group's statistics."""
    truncated: Bool
    """(S,) the response reached the token limit."""
    prompt_length: Int32
    """(S,) tokens."""
    response_length: Int32
    """(S,) tokens."""
    tokens: Int32
    """(N,) prompt and response of each sample."""
    mask: npt.NDArray[np.uint8]
    """(M,) 1 = trained."""
    rollout_log_probs: Float32
    """(M,) nats, as the engine reported them; 0 where it did not sample the token."""
    version: Int32
    """(M,) policy version that sampled the token; -1: no policy did (tool output)."""
    token_reward: Float32 | None = None
    """(M,) process rewards at trained tokens, a part of `reward`; None: no sample has any."""
    images: BatchImages | None = None
    """None: no prompt has any."""
    routed_experts: RoutedExperts | None = None
    """(N, layers, top_k) expert ids of the engine's forward of each token. Tokens that were no input of a forward, such as
    the last of each sample, have arbitrary distinct ids. None: not recorded."""

    @property
    def num_samples(self) -> int:
        return len(self.index)

    @cached_property
    def total_length(self) -> Int32:
        return self.prompt_length + self.response_length

    @cached_property
    def token_offsets(self) -> Int64:
        """(S + 1,)"""
        return np.concatenate([[0], np.cumsum(self.total_length, dtype=np.int64)])

    @cached_property
    def response_offsets(self) -> Int64:
        """(S + 1,)"""
        return np.concatenate([[0], np.cumsum(self.response_length, dtype=np.int64)])

    @cached_property
    def sample_of_token(self) -> Int64:
        """(M,) which sample a response token belongs to."""
        return np.repeat(np.arange(self.num_samples, dtype=np.int64), self.response_length)

    @cached_property
    def num_trainable(self) -> Int64:
        """(S,) trainable tokens of each sample."""
        return self.per_sample(np.add, self.mask, np.int64(0))

    def sample_sums(self, values: npt.NDArray[np.generic]) -> Float64:
        """Sums of a response column over each sample: (M,) to (S,), in float64."""
        return self.per_sample(np.add, values, np.float64(0))

    def per_sample(self, reduction: np.ufunc, values: npt.NDArray[np.generic], empty: Number) -> npt.NDArray[Number]:
        """Reduces a response column (M,) over each sample to (S,), of the dtype of `empty`, the value without a response."""
        reduced = np.full(self.num_samples, empty)
        some = np.flatnonzero(self.response_length)
        if len(some):
            reduced[some] = reduction.reduceat(values, self.response_offsets[some], dtype=empty.dtype)
        return reduced

    def per_token(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Each sample's value at each of its response tokens: (S,) to (M,)."""
        return np.repeat(values, self.response_length)

    def response_rows(self, samples: npt.NDArray[np.integer]) -> Int64:
        """Rows of a response column that belong to `samples`, in their order."""
        return ragged_rows(self.response_length, samples)

    def take(self, samples: npt.NDArray[np.integer]) -> Batch:
        """The batch of these samples, in this order."""
        samples = np.asarray(samples, dtype=np.int64)
        by_response_token = ("mask", "rollout_log_probs", "version", "token_reward")
        ragged = dict.fromkeys(by_response_token, self.response_rows(samples))
        ragged |= dict.fromkeys(("tokens", "routed_experts"), ragged_rows(self.total_length, samples))
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "images"}
        return Batch(
            **{n: c[ragged.get(n, samples)] for n, c in columns.items() if c is not None},
            images=None if self.images is None else self.images.take(samples),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenColumns:
    """float32 (M,) columns over the response tokens of a batch, in nats except values, advantages and returns. None: not
    declared as a need, so not computed. See `slime_core.contracts.needs.Need`."""

    old_log_probs: Float32 | None = None
    ref_log_probs: Float32 | None = None
    teacher_log_probs: Float32 | None = None
    values: Float32 | None = None
    entropy: Float32 | None = None
    advantages: Float32 | None = None
    returns: Float32 | None = None
    correction: Float32 | None = None
    """Product of the weights of all off-policy corrections; 0 where one masks the token."""
    loss_weight: Float32 | None = None
    """mask x weight of the sequence / D (`Aggregation`), with D counted over the whole optimizer step."""

    def present(self) -> Mapping[str, Float32]:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def take(self, rows: npt.NDArray[np.integer]) -> TokenColumns:
        """The columns at these rows of the response axis."""
        return TokenColumns(**{name: column[rows] for name, column in self.present().items()})

    def only(self, names: Collection[str]) -> TokenColumns:
        """Keeps only the columns in `names`."""
        return TokenColumns(**{name: column for name, column in self.present().items() if name in names})
