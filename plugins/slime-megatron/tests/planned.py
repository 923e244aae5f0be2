"""What Megatron.memory tells, as a function that a process started for it can be asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.contracts.memory import TrainerLoad, TrainerMemory
from slime_megatron.plugin import Megatron


def planned(options: Mapping[str, Any], load: TrainerLoad) -> TrainerMemory:
    return Megatron.memory(Megatron.Config(**options), load)
