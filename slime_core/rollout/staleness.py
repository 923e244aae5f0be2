"""Masks tokens of a sample that an older policy sampled."""

from __future__ import annotations

from dataclasses import replace

from slime_core.types.sample import Sample


def mask_kept(sample: Sample, kept_length: int) -> Sample:
    """Masks those of the first `kept_length` response tokens that an older policy sampled than the one that continued."""
    continued_by = [span.version for span in sample.spans if span.end > kept_length]
    return mask_spans(sample, continued_by[0], kept_length) if continued_by else sample


def mask_spans(sample: Sample, oldest_allowed: int, length: int) -> Sample:
    """Masks those of the first `length` tokens that versions below `oldest_allowed` sampled."""
    old = [span for span in sample.spans if span.version < oldest_allowed and span.start < length]
    if not old:
        return sample
    mask = sample.loss_mask.copy()
    for _, start, end in old:
        mask[start : min(end, length)] = 0
    return replace(sample, loss_mask=mask)
