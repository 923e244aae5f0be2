"""Seeds of requests, which depend on what is generated, not on when."""

from __future__ import annotations

import xxhash


def request_seed(*parts: int | str) -> int:
    """63 bits from the run's rollout seed, the group, the response, the turn (or an eval set's name and row)."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) >> 1
