"""Computes advantages, corrections and loss weights of the whole batch. Pure; runs once, on the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from slime_core.algorithm.loss_weights import loss_weights, split_steps
from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs, RewardShaper
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.correction import BatchCorrection, OffPolicyCorrection
from slime_core.contracts.kl import KlEstimator
from slime_core.contracts.needs import Need
from slime_core.errors import PluginError, TrainingError
from slime_core.registry.boundary import foreign, name_of, require
from slime_core.types.batch import Batch, Bool, Float32, Float64, Int64, TokenColumns

WHITENING_EPS = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """The parts of a recipe that process the whole batch."""

    advantage: AdvantageEstimator | None
    """None: the loss uses no advantages."""
    advantage_needs: frozenset[Need] = frozenset()
    advantage_terms: Sequence[tuple[AdvantageEstimator, frozenset[Need]]] = ()
    """Further estimators, each with its needs; their advantages are added to those of `advantage`."""
    shaping: Sequence[RewardShaper] = ()
    kl_reward: KlEstimator | None = None
    kl_coef: float = 0.0
    normalize_advantages: bool = False
    corrections: Sequence[tuple[OffPolicyCorrection, frozenset[Need]]] = ()
    """Corrections of the batch stage, in order, each with its needs."""
    aggregation: Aggregation = Aggregation.SEQ_MEAN
    rollouts_per_step: int
    max_response_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditedBatch:
    """A batch ready to be trained on."""

    columns: TokenColumns
    step_of_sample: Int64
    """(S,) optimizer step of each sample."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the whole batch, with prefix."""
    step_metrics: tuple[Mapping[str, float], ...] = ()
    """Metrics of the corrections for each optimizer step, without prefix."""


def compute_advantages_and_returns(batch: Batch, columns: TokenColumns, rules: AdvantageConfig) -> CreditedBatch:
    """Applies shaping, advantages, whitening, corrections and loss weights. Raises TrainingError if one is not finite."""
    metrics: dict[str, float] = {}
    step_of_sample = split_steps(batch, rules.rollouts_per_step)
    weight = loss_weights(batch, step_of_sample, rules.aggregation, rules.max_response_len)
    columns = replace(columns, loss_weight=weight)
    mask = batch.mask.astype(np.bool_)

    if rules.advantage is not None:
        rewards = batch.reward
        for shaper in rules.shaping:
            rewards = shaped_rewards(shaper, rewards, batch, rules.max_response_len)
        penalty = reward_kl(mask, columns, rules)

        def estimate(estimator: AdvantageEstimator, needs: frozenset[Need], kl_penalty: Float32 | None) -> Credit:
            requested = columns.only({need.value for need in needs})
            return estimated(
                estimator, CreditInputs(batch=batch, rewards=rewards, columns=requested, kl_penalty=kl_penalty)
            )

        credit = estimate(rules.advantage, rules.advantage_needs, penalty)
        advantages = np.where(mask, credit.advantages, np.float32(0)).astype(np.float32)
        require_finite("advantages", advantages, batch)
        returns = advantages if credit.returns is None else np.where(mask, credit.returns, np.float32(0))
        require_finite("returns", returns, batch)
        for term, needs in rules.advantage_terms:
            added = estimate(term, needs, None)
            advantages = advantages + np.where(mask, added.advantages, np.float32(0))
            require_finite("advantages", advantages, batch)
            metrics |= added.metrics
        if rules.normalize_advantages:
            advantages = whiten(advantages, mask)
        columns = replace(columns, advantages=advantages, returns=returns.astype(np.float32))
        metrics |= credit.metrics
        if credit.sample_credit is not None:
            metrics["rollout/rewards"] = mean(credit.sample_credit[np.isfinite(batch.reward)])
        metrics["rollout/advantages"] = mean(advantages[mask])
        metrics["rollout/returns"] = mean(returns[mask])
        if penalty is not None and rules.kl_coef:
            metrics["rollout/kl"] = mean(penalty[mask]) / rules.kl_coef

    step_metrics: list[dict[str, float]] = [{} for _ in range(count_steps(step_of_sample))]
    for correction, needs in rules.corrections:
        weights, of_steps = correct_steps(correction, needs, batch, columns, step_of_sample)
        require_finite("correction weights", weights, batch)
        before = columns.correction
        columns = replace(columns, correction=weights if before is None else before * weights)
        step_metrics = [known | new for known, new in zip(step_metrics, of_steps, strict=True)]
    return CreditedBatch(
        columns=columns, step_of_sample=step_of_sample, metrics=metrics, step_metrics=tuple(step_metrics)
    )


def correct_steps(
    correction: OffPolicyCorrection,
    needs: frozenset[Need],
    batch: Batch,
    columns: TokenColumns,
    step_of_sample: Int64,
) -> tuple[Float32, list[dict[str, float]]]:
    """Returns (M,) weights, 0 at masked tokens, and metrics of each step. Called per step, over which it may normalize."""
    weights = np.zeros(len(batch.mask), np.float32)
    metrics: list[dict[str, float]] = []
    for step in range(count_steps(step_of_sample)):
        samples = np.flatnonzero(step_of_sample == step)
        rows = batch.response_rows(samples)
        trained = batch.mask[rows].astype(np.bool_)
        with foreign(correction, "correct_batch"):
            corrected = correction.correct_batch(*restrict_inputs(batch.take(samples), columns.take(rows), needs))
            require(isinstance(corrected, BatchCorrection), correction, "correct_batch", corrected, "a BatchCorrection")
            for name, column in {"weights": corrected.weights, "keep": corrected.keep, **corrected.metrics}.items():
                require_array(correction, f"correct_batch of {name}", column, trained.shape)
        weights[rows] = np.where(corrected.keep & trained, corrected.weights, np.float32(0))
        means = {name: mean(values[trained]) for name, values in corrected.metrics.items()}
        metrics.append({**means, **corrected.step_metrics})
    return weights, metrics


def restrict_inputs(batch: Batch, columns: TokenColumns, needs: frozenset[Need]) -> tuple[Batch, TokenColumns]:
    """Keeps only the declared columns, advantages and returns, so that a correction that reads others fails at once."""
    requested = {need.value for need in needs} | {"advantages", "returns"}
    if Need.ROLLOUT_LOGPROBS not in needs:
        batch = replace(batch, rollout_log_probs=np.full_like(batch.rollout_log_probs, np.nan))
    return batch, columns.only(requested)


def count_steps(step_of_sample: Int64) -> int:
    return int(step_of_sample.max(initial=-1)) + 1


def reward_kl(mask: Bool, columns: TokenColumns, rules: AdvantageConfig) -> Float32 | None:
    """(M,) kl_coef x k(old, ref), 0 at masked tokens."""
    if rules.kl_reward is None:
        return None
    if columns.old_log_probs is None or columns.ref_log_probs is None:
        raise ValueError("the reward-side KL needs the old_log_probs and ref_log_probs columns")
    import torch

    old = torch.from_numpy(np.where(mask, columns.old_log_probs, np.float32(0)))
    ref = torch.from_numpy(np.where(mask, columns.ref_log_probs, np.float32(0)))
    with foreign(rules.kl_reward, "estimate of the reward's penalty"):
        kl: Float32 = rules.kl_reward(old, ref).numpy()
        require_array(rules.kl_reward, "estimate of the reward's penalty", kl, mask.shape)
    return np.where(mask, rules.kl_coef * kl, 0).astype(np.float32)


def whiten(values: Float32, mask: Bool) -> Float32:
    """Normalizes trained tokens to zero mean and unit variance (n - 1), in float64 and two passes; 0 at masked tokens."""
    chosen = values[mask].astype(np.float64)
    if len(chosen) == 0:
        return np.zeros_like(values)
    centered = chosen - chosen.mean()
    variance = float(centered @ centered) / (len(chosen) - 1) if len(chosen) > 1 else 0.0
    result = np.zeros_like(values)
    result[mask] = centered / np.sqrt(variance + WHITENING_EPS)
    return result


def shaped_rewards(shaper: RewardShaper, rewards: Float64, batch: Batch, max_response_len: int) -> Float64:
    """PluginError if the shaper raises, or does not return a number for exactly the samples that have a reward."""
    with foreign(shaper, "shape"):
        shaped = shaper.shape(rewards, batch, max_response_len)
        require_array(shaper, "shape", shaped, rewards.shape)
        wrong = np.flatnonzero(np.isfinite(shaped) != np.isfinite(rewards))
    if len(wrong):
        sample = int(wrong[0])
        raise PluginError(
            f"{name_of(shaper)}, shape: returned {shaped[sample]} for sample {batch.index[sample]} (group "
            f"{batch.group_index[sample]}), whose reward is {rewards[sample]}; NaN must stay, and numbers must be finite."
        )
    return shaped


def estimated(estimator: AdvantageEstimator, inputs: CreditInputs) -> Credit:
    """PluginError if the estimator raises, or returns something else than a number for each token."""
    tokens = inputs.batch.mask.shape
    with foreign(estimator, "estimate"):
        credit = estimator.estimate(inputs)
        require(isinstance(credit, Credit), estimator, "estimate", credit, "a Credit")
        require_array(estimator, "estimate of advantages", credit.advantages, tokens)
        if credit.returns is not None:
            require_array(estimator, "estimate of returns", credit.returns, tokens)
        if credit.sample_credit is not None:
            require_array(estimator, "estimate of sample_credit", credit.sample_credit, inputs.rewards.shape)
    return credit


def require_array(plugin: object, call: str, value: object, shape: tuple[int, ...]) -> None:
    """PluginError for another shape: numpy would repeat a single number for all tokens."""
    require(isinstance(value, np.ndarray) and value.shape == shape, plugin, call, value, f"an array of shape {shape}")


def require_finite(name: str, column: Float32, batch: Batch) -> None:
    """Raises TrainingError, with the sample, if a plugin returned a number at a trained token that is not finite."""
    bad = ~np.isfinite(column) & batch.mask.astype(np.bool_)
    if bad.any():
        sample = int(batch.sample_of_token[np.argmax(bad)])
        raise TrainingError(
            f"{name} of sample {batch.index[sample]} (group {batch.group_index[sample]}) are not finite: "
            f"{int(bad.sum())} tokens in the batch."
        )


def mean(values: npt.NDArray[np.floating]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean(dtype=np.float64)) if len(finite) else 0.0
