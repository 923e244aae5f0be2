"""Errors of failed responses, kept in their metadata for the message that ends a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from slime_core.errors import RolloutError, SlimeError
from slime_core.registry.boundary import error_text
from slime_core.types.sample import Sample, SampleGroup, Status

FAILURE: Final = "failure"
NUMBERS: Final = re.compile(r"\d+(\.\d+)?")
LONGEST: Final = 500


def with_failure(sample: Sample, error: Exception) -> Sample:
    """Adds the error to the sample's metadata, shortened; the event log has the whole text."""
    text = failure_text(error)
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return replace(sample, metadata={**sample.metadata, FAILURE: shown})


def failure_text(error: BaseException) -> str:
    """What happened, without the plugin and the prompt that it happened on: `ValueError: no digits (mine.py:12 in play)`."""
    if error.__cause__ is not None and isinstance(error, RolloutError):
        return error_text(error.__cause__)
    return str(error) if isinstance(error, SlimeError) else error_text(error)


def most_frequent(groups: Iterable[SampleGroup]) -> tuple[str, int, int] | None:
    """Returns the first text of the most frequent failure, its count, and the number of failed responses; None if none failed.
    Failures that differ only in numbers, such as row numbers, count as one."""
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
