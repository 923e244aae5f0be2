"""Metric names and how a batch's are computed. Axes: train/step, rollout/step, eval/step."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from slime_core.types.batch import Batch
from slime_core.types.sample import Sample

TRAIN_AXIS: Final = "train/step"
ROLLOUT_AXIS: Final = "rollout/step"
EVAL_AXIS: Final = "eval/step"

REPETITION_CHARS: Final = 10_000
REPETITION_RATIO: Final = 10.0
BINARY_REWARDS: Final = ((0.0, 1.0), (-1.0, 1.0))
"""Fail and pass."""


def distribution(name: str, values: npt.NDArray[np.number]) -> dict[str, float]:
    """mean, median, max and min under `name/`."""
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/median": float(np.median(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


def rollout_metrics(batch: Batch, version: int) -> dict[str, float]:
    """What a batch says of the rollouts; `version` is the policy that is about to be trained."""
    rewards = batch.reward[np.isfinite(batch.reward)]
    trained = batch.mask.astype(np.bool_)
    metrics = {
        "rollout/raw_reward": float(rewards.mean()) if len(rewards) else 0.0,
        "rollout/truncated_ratio": float(batch.truncated.mean()) if batch.num_samples else 0.0,
        **distribution("rollout/response_len", batch.num_trainable),
        **zero_std_metrics(batch),
        **pass_rate_metrics(batch),
    }
    if trained.any():
        metrics["rollout/rollout_log_probs"] = float(batch.rollout_log_probs[trained].mean(dtype=np.float64))
    staleness = sample_staleness(batch, version)
    if len(staleness):
        metrics |= {"rollout/staleness/mean": float(staleness.mean()), "rollout/staleness/max": float(staleness.max())}
    return metrics


def zero_std_metrics(batch: Batch) -> dict[str, float]:
    """How many groups earned one and the same reward, by that reward (one decimal, to keep the number of names small):
    a group that is normalised has nothing to learn from then. Groups with less than two scored samples do not count."""
    scored = np.isfinite(batch.reward)
    rewards = batch.reward[scored]
    groups, group_of_sample = np.unique(batch.group_index[scored], return_inverse=True)
    lowest, highest = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.minimum.at(lowest, group_of_sample, rewards)
    np.maximum.at(highest, group_of_sample, rewards)
    equal = (lowest == highest) & (np.bincount(group_of_sample, minlength=len(groups)) > 1)
    # Adding 0.0 turns -0.0 into 0.0.
    counts = Counter(round(reward, 1) + 0.0 for reward in lowest[equal].tolist())
    return {f"rollout/zero_std/count_{reward}": float(count) for reward, count in sorted(counts.items())}


def pass_rate_metrics(batch: Batch) -> dict[str, float]:
    """pass@k over the groups of a batch whose rewards are all fail or pass; none with one rollout per group.

    A rollout passes if all of its samples did; one without a reward did not. Of accepted groups alone: filters that drop
    hard and easy prompts move it.
    """
    rewards = batch.reward[np.isfinite(batch.reward)]
    if not len(rewards) or not any(np.isin(rewards, pair).all() for pair in BINARY_REWARDS):
        return {}
    _, first, rollout_of_sample = np.unique(batch.rollout_id, return_index=True, return_inverse=True)
    passed = np.bincount(rollout_of_sample, weights=batch.reward != 1.0) == 0
    groups, group_of_rollout = np.unique(batch.group_index[first], return_inverse=True)
    num_rollouts = np.bincount(group_of_rollout, minlength=len(groups))
    num_passed = np.bincount(group_of_rollout[passed], minlength=len(groups))
    if num_rollouts.min() < 2:
        return {}
    return {f"rollout/passrate/pass@{k}": value for k, value in pass_at_k(num_rollouts, num_passed).items()}


def step_metrics(batch: Batch, step_of_sample: npt.NDArray[np.int64]) -> list[dict[str, float]]:
    """Of each optimiser step: how many rollouts it trains on. A short batch has a short last step."""
    _, first = np.unique(batch.rollout_id, return_index=True)
    return [{"global_batch_size": float(count)} for count in np.bincount(step_of_sample[first])]


def repetition_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """The share of answers that repeat themselves: more than 10 000 characters, the last 10 000 of which zlib makes more
    than ten times smaller."""
    if not samples:
        return {}
    return {"rollout/repetition_frac": sum(repeats_itself(sample.response) for sample in samples) / len(samples)}


def repeats_itself(text: str) -> bool:
    if len(text) <= REPETITION_CHARS:
        return False
    end = text[-REPETITION_CHARS:].encode(errors="surrogatepass")
    return len(end) > REPETITION_RATIO * len(zlib.compress(end))


def sample_staleness(batch: Batch, version: int) -> npt.NDArray[np.int64]:
    """Versions between the oldest token of a sample and `version`, for each sample that has tokens of the model's."""
    written = batch.version >= 0
    oldest = np.full(batch.num_samples, np.iinfo(np.int64).max)
    np.minimum.at(oldest, batch.sample_of_token[written], batch.version[written])
    return version - oldest[oldest < np.iinfo(np.int64).max]


def column_metrics(batch: Batch, columns: dict[str, npt.NDArray[np.float32]]) -> dict[str, float]:
    """Means of score columns over the trained tokens."""
    trained = batch.mask.astype(np.bool_)
    if not trained.any():
        return {}
    return {f"rollout/{name}": float(column[trained].mean(dtype=np.float64)) for name, column in columns.items()}


def reward_part_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Means of the named numbers that rewards returned."""
    names = sorted({name for sample in samples for name in sample.reward_parts})
    return {
        f"{prefix}/{name}": float(np.mean([s.reward_parts[name] for s in samples if name in s.reward_parts]))
        for name in names
    }


def count_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Means of what generators counted; a sample that lacks a count has none of it."""
    names = sorted({name for sample in samples for name in sample.counts})
    return {f"{prefix}/{name}": float(np.mean([s.counts.get(name, 0.0) for s in samples])) for name in names}


def pass_at_k(num_samples: npt.NDArray[np.integer], num_correct: npt.NDArray[np.integer]) -> dict[int, float]:
    """k to the mean over prompts of 1 - C(n - c, k) / C(n, k), for k = 1, 2, 4, … up to the fewest samples of a prompt.

    The unbiased estimator of Chen et al., Evaluating Large Language Models Trained on Code (2107.03374), equation 1.

    >>> pass_at_k(np.array([2, 2]), np.array([1, 0]))
    {1: 0.25, 2: 0.5}
    """
    estimates = {}
    k = 1
    while k <= num_samples.min(initial=np.iinfo(np.int64).max) and len(num_samples):
        # C(n - c, k) / C(n, k) as a product, which cannot overflow; a factor is 0 or less once n - c < k.
        factors = 1.0 - num_correct[:, None] / (num_samples[:, None] - np.arange(k)[None, :])
        estimates[k] = float(np.mean(1.0 - np.clip(factors, 0.0, None).prod(axis=1)))
        k *= 2
    return estimates
