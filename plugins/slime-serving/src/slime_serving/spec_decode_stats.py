"""SpecDecodeStats: counts of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecDecodeStats:
    """Counts of speculative decoding for a response, or for a part of it: parts can be added. All are 0 if the server does not
    speculate."""

    verified: int = 0
    """Forward passes of the model itself."""
    proposed: int = 0
    accepted: int = 0
    written: int = 0
    """Tokens that those passes produced, including one per pass that the model itself sampled."""

    def __add__(self, other: SpecDecodeStats) -> SpecDecodeStats:
        return SpecDecodeStats(
            self.verified + other.verified,
            self.proposed + other.proposed,
            self.accepted + other.accepted,
            self.written + other.written,
        )

    @property
    def metrics(self) -> dict[str, float]:
        if not self.verified:
            return {}
        found = {"spec_verify_ct": float(self.verified), "spec_accept_length": self.written / self.verified}
        if self.proposed:
            found["spec_accept_rate"] = self.accepted / self.proposed
        return found
