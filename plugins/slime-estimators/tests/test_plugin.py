"""The entry points resolve, have no options, and listing them imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core import API_VERSION
from slime_core.contracts.kl import KlDriver, KlEstimator

NAMES = {"k1", "k2", "k3", "low_var_kl"}


def test_every_estimator_is_registered_and_builds():
    found = {e.name: e.load() for e in entry_points(group="slime.kl") if e.dist.name == "slime-estimators"}
    assert set(found) == NAMES
    for driver in found.values():
        assert issubclass(driver, KlDriver)
        assert driver.api_version == API_VERSION
        assert driver.__doc__
        assert isinstance(driver.build(driver.Config()), KlEstimator)
        with pytest.raises(ValidationError, match="extra"):
            driver.Config(strength=1)


def test_the_plugin_module_imports_nothing_heavy():
    code = "import sys, slime_estimators.plugin; print([m for m in ('torch', 'numpy', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
