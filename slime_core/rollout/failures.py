"""Errors of failed responses, kept in their metadata for the message that ends a run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from slime_core.errors import RolloutError, SlimeError
from slime_core.registry.boundary import error_text
from slime_core.types.sample import Sample

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
