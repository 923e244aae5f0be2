"""How far behind the policy the tokens of a group are, and what of it then still trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slime_core.rollout.staleness import mask_spans
from slime_core.types.sample import Sample, SampleGroup


def oldest_version(samples: Iterable[Sample]) -> int | None:
    """The lowest policy version that wrote any token of them; None: no policy did."""
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
