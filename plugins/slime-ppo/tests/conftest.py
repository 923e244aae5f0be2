"""Build a part by the name that a run file would use."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest


@pytest.fixture
def part():
    def build(group, name, **options):
        driver = entry_points(group=group)[name].load()
        return driver.build(driver.Config(**options))

    return build
