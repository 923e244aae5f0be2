"""The collector at a start and at the end of a command."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import pytest

from slime_core.heap import modules_stay

ENDS = """
import atexit, gc, sys
from slime_core.cli.main import main
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 10_000))
sys.argv = ["slime", "--version"]
main()
"""


def test_modules_are_not_looked_at_while_they_are_imported_nor_afterwards() -> None:
    assert gc.isenabled()
    try:
        with modules_stay():
            assert not gc.isenabled()
            made: list[object] = [[]]
            assert any(found is made for found in gc.get_objects())
        assert gc.isenabled()
        assert not any(found is made for found in gc.get_objects())
    finally:
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    try:
        with pytest.raises(ModuleNotFoundError), modules_stay():
            importlib.import_module("not_there")
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with modules_stay():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_command_leaves_its_heap_to_the_system() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "frozen True"
