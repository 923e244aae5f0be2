"""What metrics mean: the lines of docs/reference/metrics.md, as metric_meanings.json has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

FILE: Final = "metric_meanings.json"
DISTRIBUTION: Final[Mapping[str, str]] = {"mean": "mean", "median": "median", "max": "largest", "min": "smallest"}
"""What /DIST in a name is, and its word."""
PLACEHOLDER: Final = re.compile(r"[A-Z][A-Z_]*")
OF_ROLE: Final = re.compile(r"train/(?P<role>[a-z_]+)-(?P<metric>.+)")
"""A metric of a trained role beside the policy."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """A name of the reference, in which words in capitals are placeholders."""

    expression: re.Pattern[str]
    letters: int
    """Of the name, placeholders left out: of two names that match, the one with more is meant."""
    text: str

    @classmethod
    def of(cls, name: str, unit: str, meaning: str) -> Meaning:
        pieces = re.split(PLACEHOLDER, name)
        words = re.findall(PLACEHOLDER, name)
        between = [f"(?P<dist>{'|'.join(DISTRIBUTION)})" if word == "DIST" else "[^/]+" for word in words]
        if words and words[-1] != "DIST":
            # The last one may be the name of an evaluation set or a part, which may have slashes.
            between[-1] = ".+"
        expression = "".join(re.escape(piece) + then for piece, then in zip(pieces, [*between, ""], strict=True))
        text = f"{meaning} ({unit})" if unit else meaning
        return cls(re.compile(expression), sum(map(len, pieces)), text)


@cache
def meanings() -> Sequence[Meaning]:
    """Those with the most letters first."""
    lines: list[tuple[str, str, str]] = json.loads((files("slime_viewer") / FILE).read_text(encoding="utf-8"))
    return sorted((Meaning.of(*line) for line in lines), key=lambda meaning: -meaning.letters)


@cache
def meaning_of(metric: str) -> str | None:
    """A line; None for a metric that the reference does not have, such as one of a plugin."""
    for meaning in meanings():
        if (found := meaning.expression.fullmatch(metric)) is not None:
            part = found.groupdict().get("dist")
            return meaning.text if part is None else f"{meaning.text}: {DISTRIBUTION[part]}"
    if (of_role := OF_ROLE.fullmatch(metric)) is not None:
        own = meaning_of(f"train/{of_role['metric']}")
        return None if own is None else f"{own}; of the {of_role['role']}"
    return None
