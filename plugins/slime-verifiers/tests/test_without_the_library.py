"""Checks that do not import the library."""

import importlib.metadata
import subprocess
import sys

import pytest
from pydantic import ValidationError

from slime_core.errors import PluginError
from slime_verifiers.config import VerifiersTasksConfig
from slime_verifiers.plugin import Verifiers, VerifiersTasks

ENV = {"taskset": {"id": "gsm8k"}}


def version_is(monkeypatch, version):
    def installed_version(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed_version)


def test_a_missing_library_is_reported_with_the_command_to_type(monkeypatch):
    version_is(monkeypatch, None)
    for driver, options in ((Verifiers, {"env": ENV}), (VerifiersTasks, ENV)):
        with pytest.raises(PluginError, match=r'not installed here: pip install "slime-verifiers\[verifiers\]"'):
            driver.build(driver.Config(**options))


def test_another_version_is_refused(monkeypatch):
    version_is(monkeypatch, "0.1.14")
    with pytest.raises(PluginError, match=r"verifiers 0\.1\.14 is installed, and <0\.5,>=0\.4 is required"):
        VerifiersTasks.build(VerifiersTasksConfig(**ENV))


def test_a_taskset_needs_a_name():
    for driver, options in ((Verifiers, {"env": {}}), (VerifiersTasks, {"taskset": {}})):
        with pytest.raises(ValidationError, match="requires an id"):
            driver.Config(**options)


def test_the_plugin_and_its_package_import_nothing_of_it():
    code = "import sys, slime_verifiers.plugin; print([m for m in ('verifiers', 'openai') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
