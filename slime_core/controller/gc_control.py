"""Keeps the cyclic garbage collector from slowing down imports and rollouts."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator
from typing import Final

YOUNG: Final = 20_000
"""Allocations between two collections of the youngest generation. A rollout step makes tens of thousands and keeps them."""


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """Freezes all objects that exist when it is entered, until it is left.

    Without it the collector walks all modules, models and configs again and again while samples are made: measured a
    quarter of the time of a rollout step on one CPU.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disables the collector inside, and freezes the objects made there afterwards; for the imports of a start.

    Torch and transformers are 400 thousand objects, and hardly any of them is garbage: measured a sixth of a start's imports.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # Libraries with a compiled part (triton) report objects that are still alive at exit as leaks.
        atexit.register(gc.unfreeze)
        if before:
            gc.enable()
