"""Reward random: 0 or 1 by a coin; for a run that must not learn anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_core.contracts.reward import Reward
from slime_core.rollout.seeds import request_seed
from slime_core.types.sample import SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomReward(Reward):
    seed: int

    def score(self, group: SampleGroup) -> Sequence[float]:
        """By seed and sample alone: a resumed run draws the same."""
        return [float(request_seed("random", self.seed, sample.index) % 2) for sample in group.samples]
