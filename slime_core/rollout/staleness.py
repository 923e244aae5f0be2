"""Which tokens of a sample train no longer, since an older policy wrote them."""

from __future__ import annotations

from dataclasses import replace

from slime_core.types.sample import Sample


def mask_kept(sample: Sample, kept_length: int) -> Sample:
    """Without loss on the first `kept_length` response tokens, as far as a policy wrote them before the one that went on."""
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
