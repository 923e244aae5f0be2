"""How far behind the policy the tokens of a sample are, and which of them then still train."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

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


def mask_kept(sample: Sample, kept_length: int) -> Sample:
    """Without loss on the first `kept_length` tokens of the response, as far as an older policy wrote them than the one
    that went on."""
    went_on = [span.version for span in sample.spans if span.end > kept_length]
    return mask_spans(sample, went_on[0], kept_length) if went_on else sample


def mask_spans(sample: Sample, oldest_allowed: int, length: int) -> Sample:
    """Mask 0 on tokens among the first `length` that versions below `oldest_allowed` wrote."""
    old = [span for span in sample.spans if span.version < oldest_allowed and span.start < length]
    if not old:
        return sample
    mask = sample.loss_mask.copy()
    for _, start, end in old:
        mask[start : min(end, length)] = 0
    return replace(sample, loss_mask=mask)
