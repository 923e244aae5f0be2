"""Reward remote: a service of the user's own scores each sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from slime_core.contracts.reward import Outcome, Reward, RewardFailure, RewardValue
from slime_core.registry.boundary import shown
from slime_core.types.sample import SampleGroup
from slime_rm_hub.service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReward(Reward):
    service: Service
    send_metadata: bool

    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        """One number per sample, or the numbers of an object. A sample without a number fails alone."""
        bodies = []
        for sample in group.samples:
            body = {"prompt": sample.prompt.text, "response": sample.response, "label": sample.prompt.label}
            bodies.append({**body, "metadata": dict(sample.metadata)} if self.send_metadata else body)
        return [self._value(answer) for answer in self.service.ask(bodies)]

    def _value(self, answer: Any) -> RewardValue:
        if isinstance(answer, RewardFailure):
            return answer
        if is_number(answer):
            return float(answer)
        if isinstance(answer, Mapping):
            # Other values of the object are ignored.
            numbers = {str(key): float(value) for key, value in answer.items() if is_number(value)}
            if numbers:
                return numbers
        return RewardFailure(
            Outcome.WRONG, f"{self.service.name} returned {shown(answer)}, which is neither a number nor has one"
        )


def is_number(value: object) -> bool:
    """True if it is a finite number; an integer may be too large for a float."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False
