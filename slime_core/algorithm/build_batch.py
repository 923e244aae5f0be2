"""build_batch: converts groups to a batch of columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slime_core.errors import RolloutError
from slime_core.types.batch import Batch
from slime_core.types.batch_images import BatchImages
from slime_core.types.routed_experts import RoutedExperts, filled_up
from slime_core.types.sample import Sample, SampleGroup, Status


def build_batch(groups: Sequence[SampleGroup]) -> Batch:
    """Returns the samples of the groups as columns, in the order of the groups.

    Samples without a reward do not count in group statistics. Aborted, failed and removed ones are not trained on, but count
    if they have a reward. Token masks are final in the result. Raises RolloutError if some samples have expert ids and a
    trained one lacks ids that its trained tokens depend on.
    """
    samples = [sample for group in groups for sample in group.samples]

    def column(value: Callable[[Sample], Any], dtype: Any) -> Any:
        return np.fromiter((value(s) for s in samples), dtype, count=len(samples))

    def ragged(values: Sequence[Any], dtype: Any) -> Any:
        return np.concatenate([np.empty(0, dtype), *values]).astype(dtype, copy=False)

    return Batch(
        index=column(lambda s: s.index, np.int64),
        group_index=column(lambda s: s.group_index, np.int64),
        rollout_id=column(lambda s: s.rollout_id, np.int64),
        credit_key=column(lambda s: s.group_index if s.credit_key is None else s.credit_key, np.int64),
        reward=column(lambda s: np.nan if s.reward is None else s.reward, np.float64),
        truncated=column(lambda s: s.status is Status.TRUNCATED, np.bool_),
        prompt_length=column(lambda s: s.prompt_length, np.int32),
        response_length=column(lambda s: s.response_length, np.int32),
        tokens=ragged([s.tokens for s in samples], np.int32),
        mask=ragged([s.loss_mask if trains(s) else np.zeros_like(s.loss_mask) for s in samples], np.uint8),
        rollout_log_probs=ragged([s.rollout_log_probs for s in samples], np.float32),
        version=ragged([token_versions(s) for s in samples], np.int32),
        token_reward=ragged([token_rewards(s) for s in samples], np.float32)
        if any(s.span_rewards for s in samples)
        else None,
        images=BatchImages.of([s.prompt.images for s in samples]),
        routed_experts=expert_rows(samples),
    )


def trains(sample: Sample) -> bool:
    """True if its tokens may be trained on."""
    return not sample.remove_sample and sample.status not in (Status.ABORTED, Status.FAILED)


def expert_rows(samples: Sequence[Sample]) -> RoutedExperts | None:
    """(N, layers, top_k)"""
    sizes = {sample.routed_experts.shape[1:] for sample in samples if sample.routed_experts is not None}
    if not sizes:
        return None
    if len(sizes) > 1:
        raise RolloutError(f"expert ids of several models in one batch: (layers, experts a token) {sorted(sizes)}.")
    for sample in samples:
        trained = np.flatnonzero(sample.loss_mask)
        needed = sample.prompt_length + int(trained[-1]) if trains(sample) and len(trained) else 0
        held = 0 if sample.routed_experts is None else len(sample.routed_experts)
        if held < needed:
            raise RolloutError(
                f"sample {sample.index} (group {sample.group_index}) has expert ids of {held} tokens, but its last trained "
                f"token depends on {needed}: the engine or the generator omitted them."
            )
    return filled_up([sample.routed_experts for sample in samples], [len(sample.tokens) for sample in samples])


def token_versions(sample: Sample) -> np.ndarray[Any, np.dtype[np.int32]]:
    versions = np.full(sample.response_length, -1, np.int32)
    for version, start, end in sample.spans:
        versions[start:end] = version
    return versions


def token_rewards(sample: Sample) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(R,) each span's reward at its last trained token; a span without one counts in the rest of the reward."""
    earned = np.zeros(sample.response_length, np.float32)
    if trains(sample):
        for start, end, value in sample.span_rewards:
            trained = np.flatnonzero(sample.loss_mask[start:end])
            if len(trained):
                earned[start + trained[-1]] += value
    return earned
