"""The collector at a start."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import pytest

from slime_core.controller.gc_control import gc_paused


def test_modules_are_not_looked_at_while_they_are_imported_nor_afterwards() -> None:
    assert gc.isenabled()
    try:
        with gc_paused():
            assert not gc.isenabled()
            made: list[object] = [[]]
            assert any(found is made for found in gc.get_objects())
        assert gc.isenabled()
        assert not any(found is made for found in gc.get_objects())
    finally:
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    try:
        with pytest.raises(ModuleNotFoundError), gc_paused():
            importlib.import_module("not_there")
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_frozen_objects_are_released_at_the_end() -> None:
    """Libraries with a compiled part would call it leaked."""
    ends = """
import atexit, gc
from slime_core.controller.gc_control import gc_paused
atexit.register(lambda: print(gc.get_freeze_count()))
with gc_paused():
    pass
print(gc.get_freeze_count() > 1000)
"""
    ended = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "0"]
