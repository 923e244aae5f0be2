"""The cyclic garbage collector while there is work that should not wait for it."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator
from typing import Final

YOUNG: Final = 20_000
"""Objects made before the collector looks at the young ones. A rollout step makes tens of thousands and keeps them."""


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """What exists when it is entered stays as long as it lasts.

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
def modules_stay() -> Iterator[None]:
    """Around the imports of a start: the collector neither runs while they are made, nor looks at them afterwards.

    Torch and transformers are 400 thousand objects, and hardly any of them is garbage: measured a sixth of a start's imports.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # Libraries with a compiled part (triton) print what is still there at the end, as leaks.
        atexit.register(gc.unfreeze)
        if before:
            gc.enable()
