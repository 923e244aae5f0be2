"""mis: importance sampling between trainer and engine by token, sequence or geometric mean, with rejection and veto.

Legend: M response tokens, S samples, U units (tokens or samples, by the level).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from slime_core.contracts.correction import BatchCorrection, OffPolicyCorrection
from slime_core.types.batch import Batch, Bool, Float64, Int64, TokenColumns

MAX_LOG_RATIO = 20.0


class Bounds(NamedTuple):
    """Bounds of the ratio, both inclusive."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """The units of a level, each with one ratio: tokens or samples."""

    ratio: Float64
    """(U,) exp of the level's log-ratio, its exponent clamped to [-20, 20]."""
    counted: Bool
    """(U,) True for a trained token, or a sample that has one."""
    of_token: Int64
    """(M,) unit of each token, in [0, U)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """x = old - rollout of the samples of an optimizer step."""

    values: Float64
    """(M,) nats, 0 at masked tokens."""
    batch: Batch

    @classmethod
    def of(cls, batch: Batch, columns: TokenColumns) -> Gap:
        assert columns.old_log_probs is not None
        trained = batch.mask.astype(np.bool_)
        old = np.where(trained, columns.old_log_probs, 0.0).astype(np.float64)
        return cls(values=old - np.where(trained, batch.rollout_log_probs, 0.0), batch=batch)

    def token(self) -> Units:
        """x_t."""
        return self._units(self.values, self.batch.mask, np.arange(len(self.values)))

    def sequence(self) -> Units:
        """The sum of x over a sample's trained tokens."""
        sums = self.batch.sample_sums(self.values)
        return self._units(sums, self.batch.num_trainable, self.batch.sample_of_token)

    def geometric(self) -> Units:
        """The mean of x over a sample's trained tokens."""
        means = self.batch.sample_sums(self.values) / np.maximum(self.batch.num_trainable, 1)
        return self._units(means, self.batch.num_trainable, self.batch.sample_of_token)

    @staticmethod
    def _units(log_ratio: Float64, counts: np.ndarray, of_token: Int64) -> Units:
        ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        return Units(ratio=ratio, counted=counts > 0, of_token=of_token)


LEVELS: Final[Mapping[str, Callable[[Gap], Units]]] = {
    "token": Gap.token,
    "sequence": Gap.sequence,
    "geometric": Gap.geometric,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighted:
    """(U,) each."""

    weights: Float64
    keep: Bool
    beyond: Mapping[str, Bool]
    """Metric name -> (U,) where this bound changed the weight."""


def truncate(ratio: Float64, bounds: Bounds) -> Weighted:
    above = ratio > bounds.high
    keep = np.ones(len(ratio), np.bool_)
    return Weighted(weights=np.minimum(ratio, bounds.high), keep=keep, beyond={"truncate_fraction": above})


def clip(ratio: Float64, bounds: Bounds) -> Weighted:
    beyond = {"clip_fraction_low": ratio < bounds.low, "clip_fraction_high": ratio > bounds.high}
    keep = np.ones(len(ratio), np.bool_)
    return Weighted(weights=np.clip(ratio, bounds.low, bounds.high), keep=keep, beyond=beyond)


def mask(ratio: Float64, bounds: Bounds) -> Weighted:
    below, above = ratio < bounds.low, ratio > bounds.high
    beyond = {"mask_fraction_low": below, "mask_fraction_high": above}
    return Weighted(weights=ratio, keep=~(below | above), beyond=beyond)


MODES: Final[Mapping[str, Callable[[Float64, Bounds], Weighted]]] = {"truncate": truncate, "clip": clip, "mask": mask}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """Options of the weights."""

    level: str
    mode: str
    bounds: Bounds
    normalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Options of the rejection, which does not depend on the weights."""

    level: str
    bounds: Bounds


class MaskedImportanceSampling(OffPolicyCorrection):
    """Weights, rejection and veto, each optional; a token that any of them masks has no gradient.

    Source: J. Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (2025). Differs from `TruncatedImportanceSampling` in that it sees the whole optimizer step: ratios of samples, and
    weights that are normalized over all micro-batches and ranks.
    """

    def __init__(
        self, *, weighting: Weighting | None, rejection: Rejection | None, veto_threshold: float | None
    ) -> None:
        self._weighting = weighting
        self._rejection = rejection
        self._veto_threshold = veto_threshold

    def correct_batch(self, batch: Batch, columns: TokenColumns) -> BatchCorrection:
        gap = Gap.of(batch, columns)
        weights = np.ones(len(gap.values))
        keep = np.ones(len(gap.values), np.bool_)
        beyond: dict[str, Bool] = {}
        step_metrics: dict[str, float] = {}
        if self._weighting is not None:
            units = LEVELS[self._weighting.level](gap)
            weighted = MODES[self._weighting.mode](units.ratio, self._weighting.bounds)
            of_unit = weighted.weights
            if self._weighting.normalize:
                of_unit = over_mean(of_unit, units.counted & weighted.keep)
            weights, keep = of_unit[units.of_token], weighted.keep[units.of_token]
            beyond |= {name: values[units.of_token] for name, values in weighted.beyond.items()}
        if self._rejection is not None:
            units = LEVELS[self._rejection.level](gap)
            low, high = units.ratio < self._rejection.bounds.low, units.ratio > self._rejection.bounds.high
            keep = keep & ~(low | high)[units.of_token]
            beyond |= {"rs_fraction_low": low[units.of_token], "rs_fraction_high": high[units.of_token]}
        if self._veto_threshold is not None:
            vetoed = batch.sample_sums(gap.values < np.log(self._veto_threshold)) > 0
            keep = keep & ~batch.per_token(vetoed)
            trained = batch.num_trainable > 0
            step_metrics["mis_veto_fraction"] = float(vetoed[trained].mean()) if trained.any() else 0.0
        return BatchCorrection(
            weights=weights.astype(np.float32),
            keep=keep,
            metrics={f"mis_{name}": values.astype(np.float64) for name, values in beyond.items()},
            step_metrics={**step_metrics, **weight_metrics(weights, keep, batch.mask.astype(np.bool_))},
        )


def over_mean(weights: Float64, counted: Bool) -> Float64:
    """(U,) weights divided by the mean of the counted ones."""
    return weights / weights[counted].mean() if counted.any() else weights


def weight_metrics(weights: Float64, keep: Bool, trained: Bool) -> dict[str, float]:
    """Metrics of the weights. The mean includes masked tokens as 0, since the loss is multiplied with it; minimum and maximum
    do not."""
    metrics = {"mis_weight_mean": float(np.where(keep, weights, 0.0)[trained].mean()) if trained.any() else 0.0}
    kept = weights[keep & trained]
    if len(kept):
        metrics |= {"mis_weight_min": float(kept.min()), "mis_weight_max": float(kept.max())}
    return metrics
