"""Seeds of requests: a function of what is generated, not of when."""

from __future__ import annotations

import xxhash


def request_seed(*parts: int | str) -> int:
    """63 bits from the run's rollout seed, the group, the answer, the turn (or an eval set's name and row)."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) >> 1
