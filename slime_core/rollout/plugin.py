"""The kernel's own generator and collectors, registered like anyone else's."""

from __future__ import annotations

from typing import Any

from slime_core.contracts.collector import Collector, CollectorDriver
from slime_core.contracts.generator import Generator, GeneratorDriver


class SingleTurnDriver(GeneratorDriver):
    """One engine call per response."""

    @classmethod
    def build(cls, config: Any) -> Generator:
        from slime_core.rollout.single_turn import SingleTurn

        return SingleTurn()


class AcceptedDriver(CollectorDriver):
    """Prompts from the buffer, groups judged by the filters in submission order."""

    @classmethod
    def build(cls, config: Any) -> Collector[Any]:
        from slime_core.rollout.accepted import AcceptedGroups

        return AcceptedGroups()
