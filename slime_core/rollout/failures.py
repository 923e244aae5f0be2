"""What answers failed of, kept with them until somebody has to be told."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from slime_core.types.sample import Sample, SampleGroup, Status

FAILURE: Final = "failure"
NUMBERS: Final = re.compile(r"\d+(\.\d+)?")
LONGEST: Final = 500


def with_failure(sample: Sample, error: Exception) -> Sample:
    """In the sample's metadata; the whole text is the event log's."""
    text = f"{type(error).__name__}: {error}"
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return replace(sample, metadata={**sample.metadata, FAILURE: shown})


def most_frequent(groups: Iterable[SampleGroup]) -> tuple[str, int, int] | None:
    """The first of the most frequent failures, how often there was such a one, and the number of all failed answers; None if
    none failed. Failures that differ in numbers alone, such as those of prompts, are alike."""
    texts = [
        str(sample.metadata[FAILURE])
        for group in groups
        for sample in group.samples
        if sample.status is Status.FAILED and FAILURE in sample.metadata
    ]
    if not texts:
        return None
    alike = [NUMBERS.sub("#", text) for text in texts]
    [(chosen, count)] = Counter(alike).most_common(1)
    return texts[alike.index(chosen)], count, len(texts)
