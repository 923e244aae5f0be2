"""Corrections by the name that a run file would use."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("correction_scenes")


@pytest.fixture
def correction():
    return lambda name: entry_points(group="slime.corrections")[name].load()
