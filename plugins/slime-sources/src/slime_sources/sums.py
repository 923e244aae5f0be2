"""Additions."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from slime_sources.config import SumsConfig


def row_of(config: SumsConfig, number: int, seed: int) -> Mapping[str, Any]:
    draws = random.Random(f"{seed}/{number}")
    terms = [draws.randrange(10 ** draws.randint(1, config.digits)) for _ in range(config.terms)]
    return {"input": "+".join(map(str, terms)) + "=", "label": str(sum(terms))}
