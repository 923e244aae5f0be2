"""The kernel's own generator, registered like anyone else's."""

from __future__ import annotations

from typing import Any

from slime_core.contracts.generator import Generator, GeneratorDriver


class SingleTurnDriver(GeneratorDriver):
    """One engine call per response."""

    @classmethod
    def build(cls, config: Any) -> Generator:
        from slime_core.rollout.single_turn import SingleTurn

        return SingleTurn()
