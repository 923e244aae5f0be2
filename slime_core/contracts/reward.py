"""Reward: a number (or named numbers) for every sample of a group. Runs in a worker process with a time limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from slime_core.types.sample import Sample, SampleGroup

RewardValue: TypeAlias = "float | Mapping[str, float]"
"""A number, or named numbers of which `reward_key` picks the one to train on."""


class Reward(ABC):
    """Sees the whole group, so that answers can be compared. Called in a worker process: it may block, up to the time
    limit; it may not rely on state between calls."""

    @abstractmethod
    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        """One value per sample, in their order; aborted and failed samples are not in `group`. Finite numbers."""


class RewardDriver(Driver[Reward]):
    """The simplest one is a plain function `def reward(sample) -> float`, which the registry accepts as it is."""

    reward_key: ClassVar[str | None] = None
    """Which of several named numbers is trained on when the run names no `reward_key`."""


RewardFunction: TypeAlias = "Callable[[Sample], RewardValue]"
