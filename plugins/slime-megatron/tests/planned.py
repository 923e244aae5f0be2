"""Calls Megatron.memory, as a function that a separate process can run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_megatron.plugin import Megatron
from slime_training.memory_plan import TrainerLoad, TrainerMemory


def planned(options: Mapping[str, Any], load: TrainerLoad) -> TrainerMemory:
    return Megatron.memory(Megatron.Config(**options), load)
