"""Batches to try parts on: one with everything that a real one may hold, and those of examples.

Legend: S samples, M response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from slime_core.algorithm.loss_weights import loss_weights
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.example import ExampleSample
from slime_core.types.batch import Batch, Bool, Float32, Float64, Int64, TokenColumns

MAX_RESPONSE_LEN: Final = 16
LENGTHS: Final = ((3, 5), (2, 3), (4, 2), (1, 7), (6, 0), (2, 4), (3, 3), (1, 1), (2, 6), (2, 4), (5, 2))
"""(prompt, response) tokens: an empty response, a prompt of one token, responses of one token to seven."""
MASKS: Final = (
    (1, 1, 1, 1, 1), (1, 0, 1), (1, 1), (1, 1, 0, 0, 0, 1, 1), (), (1, 1, 1, 1), (0, 0, 0), (1,), (1, 1, 1, 1, 1, 0),
    (0, 0, 0, 0), (1, 1),
)  # fmt: skip
"""Tool output inside and at the end of responses, a fully masked sample, one without a reward, a group of one."""
GROUPS: Final = (0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 2)
"""Interleaved, so that a part that goes by position and not by key shows."""
ROLLOUTS: Final = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9)
"""Samples 1 and 2 are one trajectory."""
REWARDS: Final = (1.0, 0.0, 0.5, 1.0, 0.0, 2.0, -1.0, 0.5, 0.25, np.nan, 0.75)
NUM_ROLLOUTS: Final = 10

WHOLE: Final = (tuple(range(len(LENGTHS))),)
SPLITS: Final = (
    ((0, 1, 2, 3, 4), (5,), (6, 7, 8, 9, 10)),
    tuple((sample,) for sample in range(len(LENGTHS))),
    ((1, 8, 4), (2, 0), (), (7, 6, 5, 3, 10, 9)),
    ((4,), (6, 9), (0, 1, 2, 3, 5, 7, 8, 10)),
)
"""Micro-batches: uneven, one sample each, a rollout torn apart and one without samples, some with nothing to train."""
ORDER: Final = (8, 2, 4, 10, 0, 6, 9, 3, 1, 7, 5)
SHARDS: Final = (((8, 1, 3, 6, 9), ((0, 2), (1, 4), (3,))), ((0, 2, 4, 5, 7, 10), ((1, 0), (4, 3, 2, 5), ())))
"""Two data-parallel ranks: the samples of each, and its micro-batches as indices into them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """(M,) float64 each: outputs of the trained model for the response tokens."""

    log_probs: Float64
    entropy: Float64
    values: Float64

    def take(self, rows: Int64) -> Policy:
        return Policy(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def trial_batch() -> Batch:
    """The samples above, with random tokens and log-probs."""
    rng = np.random.default_rng(11)
    prompt, response = (np.array(side, np.int32) for side in zip(*LENGTHS, strict=True))
    mask = np.array([bit for row in MASKS for bit in row], np.uint8)
    return Batch(
        index=np.arange(len(LENGTHS), dtype=np.int64),
        group_index=np.array(GROUPS, np.int64),
        rollout_id=np.array(ROLLOUTS, np.int64),
        credit_key=np.array(GROUPS, np.int64),
        reward=np.array(REWARDS, np.float64),
        truncated=np.arange(len(LENGTHS)) == 3,
        prompt_length=prompt,
        response_length=response,
        tokens=rng.integers(3, 90, int(prompt.sum() + response.sum())).astype(np.int32),
        mask=mask,
        # An engine reports nothing for tokens that it did not sample.
        rollout_log_probs=np.where(mask, rng.normal(-2, 0.6, len(mask)), 0).astype(np.float32),
        version=np.where(mask, 3, -1).astype(np.int32),
    )


def trial_columns(batch: Batch, *, gap: float = 0.3) -> TokenColumns:
    """Every column there is: scores, credit that differs from token to token, seq_mean weights.

    `gap`: how far, in nats, the scores of different weights lie apart.
    """
    rng = np.random.default_rng(12)
    count = len(batch.mask)
    near = batch.rollout_log_probs.astype(np.float64)

    def apart(scale: float) -> Float32:
        return (near + scale * rng.normal(size=count)).astype(np.float32)

    steps = np.zeros(batch.num_samples, np.int64)
    return TokenColumns(
        old_log_probs=apart(gap),
        ref_log_probs=apart(1.5 * gap),
        teacher_log_probs=apart(2 * gap),
        values=rng.normal(size=count).astype(np.float32),
        entropy=rng.uniform(0.1, 3, count).astype(np.float32),
        advantages=rng.normal(size=count).astype(np.float32),
        returns=rng.normal(size=count).astype(np.float32),
        loss_weight=loss_weights(batch, steps, Aggregation.SEQ_MEAN, MAX_RESPONSE_LEN),
    )


def trial_policy(columns: TokenColumns, *, gap: float = 0.3) -> Policy:
    """Scores under the current weights, `gap` nats away from the old ones; exact in float32."""
    assert columns.old_log_probs is not None
    assert columns.values is not None
    rng = np.random.default_rng(13)
    count = len(columns.old_log_probs)

    def exact(values: Float64) -> Float64:
        return values.astype(np.float32).astype(np.float64)

    return Policy(
        log_probs=exact(columns.old_log_probs + gap * rng.normal(size=count)),
        entropy=exact(rng.uniform(0.1, 3, count)),
        values=exact(columns.values + gap * rng.normal(size=count)),
    )


POISON: Final = (np.nan, np.inf, -np.inf, 1e30)


def poisoned(column: Float32, mask: Bool) -> Float32:
    """NaN, infinities and huge numbers in turn where the mask is off."""
    garbage = np.resize(np.array(POISON, np.float32), len(column))
    return np.where(mask, column, garbage).astype(np.float32)


def poison_columns(columns: TokenColumns, mask: Bool) -> TokenColumns:
    """Garbage at masked tokens in everything but the weights, which are 0 there."""
    kept = {"loss_weight"}
    return replace(
        columns,
        **{name: poisoned(column, mask) for name, column in columns.present().items() if name not in kept},
    )


def poison_policy(policy: Policy, mask: Bool) -> Policy:
    garbage = np.resize(np.array(POISON, np.float64), len(mask))
    return Policy(**{f.name: np.where(mask, getattr(policy, f.name), garbage) for f in fields(policy)})


def fully_masked(batch: Batch) -> Batch:
    return replace(batch, mask=np.zeros_like(batch.mask))


# --- Batches of examples ----------------------------------------------------------------------------------------------

COLUMNS: Final = tuple(f.name for f in fields(TokenColumns) if f.name not in ("correction", "loss_weight"))


def example_batch(samples: Sequence[ExampleSample]) -> Batch:
    """Each sample a prompt of one token; without rollout log-probs they are 0."""
    masks = [np.array(sample.mask, np.uint8) for sample in samples]
    lengths = np.array([len(mask) for mask in masks], np.int32)
    rollouts = [sample.rollout for sample in samples]
    # Rollouts of their own get numbers beyond those that were given.
    first_free = max((rollout for rollout in rollouts if rollout is not None), default=-1) + 1
    own = first_free + np.arange(len(samples))
    total = int(lengths.sum()) + len(samples)
    group = np.array([sample.group for sample in samples], np.int64)
    return Batch(
        index=np.arange(len(samples), dtype=np.int64),
        group_index=group,
        rollout_id=np.array([own[n] if r is None else r for n, r in enumerate(rollouts)], np.int64),
        credit_key=group,
        reward=np.array([sample.reward for sample in samples], np.float64),
        truncated=np.array([sample.truncated for sample in samples], np.bool_),
        prompt_length=np.ones(len(samples), np.int32),
        response_length=lengths,
        tokens=np.full(total, 5, np.int32),
        mask=np.concatenate([np.empty(0, np.uint8), *masks]),
        rollout_log_probs=column_of(samples, "rollout_log_probs", default=0.0).astype(np.float32),
        version=np.zeros(int(lengths.sum()), np.int32),
    )


def example_columns(samples: Sequence[ExampleSample]) -> TokenColumns:
    """What the samples give, as the driver sees it: `values` are the critic's from before the training."""
    given = {name: column_of(samples, name) for name in COLUMNS if is_given(samples, name)}
    return TokenColumns(**{name: column.astype(np.float32) for name, column in given.items()})


def is_given(samples: Sequence[ExampleSample], name: str) -> bool:
    return any(getattr(sample, name) is not None for sample in samples)


def column_of(samples: Sequence[ExampleSample], name: str, *, default: float = np.nan) -> Float64:
    """(M,); `default` for samples that do not give it."""
    rows = [getattr(sample, name) for sample in samples]
    return flat([[default] * len(s.mask) if row is None else row for s, row in zip(samples, rows, strict=True)])


def flat(rows: Sequence[Sequence[float]]) -> Float64:
    """(M,) of a row for each sample."""
    return np.array([number for row in rows for number in row], np.float64)
