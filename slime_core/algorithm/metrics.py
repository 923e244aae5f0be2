"""Metrics of a batch and their names. Axes: train/step, rollout/step, eval/step."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from slime_core.config.run import DebugConfig
from slime_core.contracts.needs import Need
from slime_core.types.batch import Batch
from slime_core.types.sample import Sample

TRAIN_AXIS: Final = "train/step"
ROLLOUT_AXIS: Final = "rollout/step"
EVAL_AXIS: Final = "eval/step"

ZERO_STD_FRAC: Final = "rollout/zero_std/frac"
REPETITION_CHARS: Final = 10_000
REPETITION_RATIO: Final = 10.0
METRIC_OF_COLUMN: Final = {"old_log_probs": "log_probs"}
"""Columns whose metric has another name."""
BINARY_REWARDS: Final = ((0.0, 1.0), (-1.0, 1.0))
"""Pairs (fail, pass)."""


def distribution(name: str, values: npt.NDArray[np.number]) -> dict[str, float]:
    """mean, median, max and min as `name/...`; empty without values."""
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/median": float(np.median(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


def rollout_metrics(batch: Batch, version: int) -> dict[str, float]:
    """Rollout metrics of a batch; version: policy version that will be trained."""
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
        behind, counts = np.unique(staleness, return_counts=True)
        metrics |= {
            f"rollout/staleness/count_{versions}": float(count)
            for versions, count in zip(behind.tolist(), counts.tolist(), strict=True)
        }
    return metrics


def zero_std_metrics(batch: Batch) -> dict[str, float]:
    """Counts groups whose rewards are all equal, by reward (rounded to one decimal, for few names), and their share: with
    normalization they have no signal. Groups with fewer than two scored samples do not count."""
    scored = np.isfinite(batch.reward)
    rewards = batch.reward[scored]
    groups, group_of_sample = np.unique(batch.group_index[scored], return_inverse=True)
    lowest, highest = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.minimum.at(lowest, group_of_sample, rewards)
    np.maximum.at(highest, group_of_sample, rewards)
    compared = np.bincount(group_of_sample, minlength=len(groups)) > 1
    equal = (lowest == highest) & compared
    # Adding 0.0 turns -0.0 into 0.0.
    counts = Counter(round(reward, 1) + 0.0 for reward in lowest[equal].tolist())
    share = {ZERO_STD_FRAC: float(equal.sum() / compared.sum())} if compared.any() else {}
    return {**share, **{f"rollout/zero_std/count_{reward}": float(count) for reward, count in sorted(counts.items())}}


def pass_rate_metrics(batch: Batch, *, always: bool = False) -> dict[str, float]:
    """pass@k over the groups of a batch, if all its rewards are fail or pass, or `always`; empty with one rollout per group.

    A rollout passes if all of its samples have reward 1. Only accepted groups count, so filters change it.
    """
    rewards = batch.reward[np.isfinite(batch.reward)]
    binary = any(np.isin(rewards, pair).all() for pair in BINARY_REWARDS)
    if not len(rewards) or not (binary or always):
        return {}
    _, first, rollout_of_sample = np.unique(batch.rollout_id, return_index=True, return_inverse=True)
    passed = np.bincount(rollout_of_sample, weights=batch.reward != 1.0) == 0
    groups, group_of_rollout = np.unique(batch.group_index[first], return_inverse=True)
    num_rollouts = np.bincount(group_of_rollout, minlength=len(groups))
    num_passed = np.bincount(group_of_rollout[passed], minlength=len(groups))
    if num_rollouts.min() < 2:
        return {}
    return {f"rollout/passrate/pass@{k}": value for k, value in pass_at_k(num_rollouts, num_passed).items()}


def correct_metrics(batch: Batch, entropy: npt.NDArray[np.float32] | None) -> dict[str, float]:
    """Share and lengths of the samples with reward 1, and the mean entropy of their tokens if it was computed."""
    correct = batch.reward == 1.0
    metrics = {
        "rollout/correct/frac": float(correct.mean()) if batch.num_samples else 0.0,
        **distribution("rollout/correct/response_len", batch.num_trainable[correct]),
    }
    chosen = batch.per_token(correct) & batch.mask.astype(np.bool_)
    if entropy is not None and chosen.any():
        metrics["rollout/correct/entropy"] = float(entropy[chosen].mean(dtype=np.float64))
    return metrics


def multi_turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Turns (runs of model tokens) per sample, their lengths, and response lengths with and without environment tokens."""
    if not samples:
        return {}
    masks = [sample.loss_mask.astype(np.bool_) for sample in samples]
    starts = [np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]])) for mask in masks]
    ends = [np.flatnonzero(mask & ~np.concatenate([mask[1:], [False]])) + 1 for mask in masks]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    whole = np.array([len(mask) for mask in masks])
    written = np.array([int(mask.sum()) for mask in masks])
    return {
        **distribution("rollout/multi_turn/turns", np.array([len(start) for start in starts])),
        **distribution("rollout/multi_turn/turn_len", np.concatenate(lengths)),
        **distribution("rollout/multi_turn/response_len", whole),
        **distribution("rollout/multi_turn/response_len_without_environment", written),
    }


def group_metrics(batch: Batch) -> dict[str, float]:
    """Number of groups, and the standard deviation (n) of rewards in groups with at least two scored samples."""
    scored = np.isfinite(batch.reward)
    _, group_of_sample = np.unique(batch.group_index[scored], return_inverse=True)
    sizes = np.bincount(group_of_sample)
    if not len(sizes):
        return {}
    means = np.bincount(group_of_sample, weights=batch.reward[scored]) / sizes
    squares = np.bincount(group_of_sample, weights=(batch.reward[scored] - means[group_of_sample]) ** 2) / sizes
    return {
        "rollout/groups": float(len(sizes)),
        **distribution("rollout/group_reward_std", np.sqrt(squares[sizes > 1])),
    }


def category_metrics(samples: Sequence[Sample], key: str) -> dict[str, float]:
    """Share of samples per category. key: name of a number that the reward returned; each of its values is a category."""
    found = Counter(sample.reward_parts[key] for sample in samples if key in sample.reward_parts)
    return {f"rollout/error_cat/{value:g}": count / len(samples) for value, count in sorted(found.items())}


def step_rollout_metrics(
    asked: DebugConfig,
    batch: Batch,
    samples: Sequence[Sample],
    version: int,
    columns: Mapping[str, npt.NDArray[np.float32]] = MappingProxyType({}),
) -> dict[str, float]:
    """All rollout metrics of a step. asked: enables those that are off by default. columns: (M,) each, by `Need`."""
    metrics = {
        **rollout_metrics(batch, version),
        **group_metrics(batch),
        **repetition_metrics(samples),
        **reward_part_metrics(samples, "rollout/reward_part"),
        **count_metrics(samples, "rollout/count"),
        **column_metrics(batch, {METRIC_OF_COLUMN.get(name, name): column for name, column in columns.items()}),
    }
    if asked.log_passrate:
        metrics |= pass_rate_metrics(batch, always=True)
    if asked.log_correct_samples:
        metrics |= correct_metrics(batch, columns.get(Need.ENTROPY))
    if asked.log_multi_turn:
        metrics |= multi_turn_metrics(samples)
    if asked.log_reward_category is not None:
        metrics |= category_metrics(samples, asked.log_reward_category)
    return metrics


def generation_metrics(samples: Sequence[Sample], seconds: float, num_devices: int) -> dict[str, float]:
    """Generation throughput of a step: response tokens, and effective tokens, which are trained on."""
    lengths = np.array([sample.response_length for sample in samples], np.int64)
    trained = sum(sample.num_trainable for sample in samples)
    return {
        "perf/tokens_per_gpu_per_sec": float(lengths.sum()) / seconds / num_devices,
        "perf/effective_tokens_per_gpu_per_sec": trained / seconds / num_devices,
        "perf/longest_sample_tokens_per_sec": float(lengths.max(initial=0)) / seconds,
    }


def step_metrics(batch: Batch, step_of_sample: npt.NDArray[np.int64]) -> list[dict[str, float]]:
    """Number of rollouts of each optimizer step; the last step may have fewer."""
    _, first = np.unique(batch.rollout_id, return_index=True)
    return [{"global_batch_size": float(count)} for count in np.bincount(step_of_sample[first])]


def repetition_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Share of responses above 10 000 characters, the last 10 000 of which zlib compresses more than tenfold."""
    if not samples:
        return {}
    return {"rollout/repetition_frac": sum(repeats_itself(sample.response) for sample in samples) / len(samples)}


def repeats_itself(text: str) -> bool:
    if len(text) <= REPETITION_CHARS:
        return False
    end = text[-REPETITION_CHARS:].encode(errors="surrogatepass")
    return len(end) > REPETITION_RATIO * len(zlib.compress(end))


def sample_staleness(batch: Batch, version: int) -> npt.NDArray[np.int64]:
    """Staleness of each sample with model tokens: `version` minus the version of its oldest token."""
    never = np.iinfo(np.int32).max
    oldest = batch.per_sample(np.minimum, np.where(batch.version < 0, never, batch.version), np.int64(never))
    return version - oldest[oldest < never]


def column_metrics(batch: Batch, columns: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, float]:
    """Means of columns over the trained tokens."""
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
    """Means of the generators' counters; a missing counter is 0."""
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
