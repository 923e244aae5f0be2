"""slime_core.testing, the contract kit's old name. Tests run in processes of their own, because imports persist."""

import subprocess
import sys

import pytest

MODULES = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import slime_core.testing
    import slime_core.testing as again
assert [(w.category, w.filename) for w in caught] == [(DeprecationWarning, "<string>")], caught
assert "slime_plugin_kit" in str(caught[0].message)

from slime_core.testing.groups import group_of as old
from slime_core.testing import differences
import slime_core.testing.suites.entries as suite
import slime_plugin_kit.differences, slime_plugin_kit.suites.entries
from slime_plugin_kit.groups import group_of as new
assert old is new
assert again is slime_core.testing is slime_plugin_kit
assert differences is slime_plugin_kit.differences
assert suite is slime_plugin_kit.suites.entries
assert suite.__spec__.name == suite.__name__ == "slime_plugin_kit.suites.entries"
"""
WITHOUT = """
import sys
sys.modules["slime_plugin_kit"] = None
import slime_core.testing
"""


def python(code, *options):
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)


def test_its_modules_are_those_of_the_kit_and_are_loaded_once():
    done = python(MODULES)
    assert done.returncode == 0, done.stderr


def test_nothing_else_of_the_kernel_warns():
    assert python("import slime_core, slime_core.cli.main", "-W", "error").returncode == 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (WITHOUT, "ModuleNotFoundError: slime_core.testing is slime_plugin_kit now: pip install slime-plugin-kit"),
        ("import slime_core.testing.nothing", "ModuleNotFoundError: No module named 'slime_plugin_kit.nothing'"),
        ("import slime_core.training", "ModuleNotFoundError: No module named 'slime_core.training'"),
    ],
)
def test_missing_modules_and_names_are_reported(code, expected):
    assert expected in python(code).stderr
