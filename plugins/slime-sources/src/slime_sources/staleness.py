"""The staleness of groups, and masking of stale tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slime_core.rollout.staleness import mask_spans
from slime_core.types.sample import Sample, SampleGroup


def oldest_version(samples: Iterable[Sample]) -> int | None:
    """The oldest policy version that generated a token of the samples; None if no policy did."""
    return min((span.version for sample in samples for span in sample.spans), default=None)


def is_stale(samples: Iterable[Sample], oldest_allowed: int) -> bool:
    oldest = oldest_version(samples)
    return oldest is not None and oldest < oldest_allowed


def mask_stale(group: SampleGroup, oldest_allowed: int) -> tuple[SampleGroup, int]:
    """The group without loss on tokens of older versions, and how many tokens that takes out."""
    samples = tuple(mask_spans(sample, oldest_allowed, sample.response_length) for sample in group.samples)
    lost = sum(
        int(old.loss_mask.sum()) - int(new.loss_mask.sum()) for old, new in zip(group.samples, samples, strict=True)
    )
    return replace(group, samples=samples), lost
