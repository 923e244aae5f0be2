"""The GPUs of an engine's servers."""

from __future__ import annotations

import os
from typing import Final

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError

DEVICES: Final = "CUDA_VISIBLE_DEVICES"


def devices_of(setup: EngineSetup, place: int, servers: int) -> tuple[str, ...]:
    """The GPUs of one of the engine's servers, by their names in CUDA_VISIBLE_DEVICES."""
    each = setup.devices_here // servers
    visible = os.environ.get(DEVICES)
    if visible is None:
        # One machine, all its GPUs: engines in order.
        first = setup.first_device + place * each
        return tuple(str(number) for number in range(first, first + each))
    names = [name for name in visible.split(",") if name]
    if len(names) < setup.devices_here:
        raise EngineError(
            f"engine {setup.index}: it requires {setup.devices_here} GPUs, but {DEVICES} = {visible} has {len(names)}."
        )
    # A launcher that places engines shows each its own devices only.
    first = 0 if len(names) == setup.devices_here else setup.first_device % len(names)
    return tuple(names[first + place * each : first + (place + 1) * each])
