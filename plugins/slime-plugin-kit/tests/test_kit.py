"""The kit as a pytest plugin: what it collects, what it refuses, and that it fails when a case has not run."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest
from kit_run import run_kit

from slime_plugin_kit.kinds import KINDS, REWARDS

MINE = """
from slime_core.contracts.example import RewardExample
from slime_core.plugin import reward

@reward("short", examples=[RewardExample(responses=("abc", ""), rewards=(-3.0, 0.0))])
def short(sample):
    return -float(len(sample.response))
"""
# Settings under which none of the suites' own names would count.
SETTINGS = """
[pytest]
python_files = check_*.py
python_functions = check_*
testpaths = checks
"""
NOT_THE_KIT = "def check_mine():\n    raise AssertionError('my own test')\n"
LEAVES_OUT = """
import pytest

def pytest_collection_modifyitems(config, items):
    for item in items:
        if "an_empty_response_is_scored" in item.name:
            item.add_marker(pytest.mark.skip(reason="some other day"))
        if "examples_get_their_rewards" in item.name:
            item.add_marker(pytest.mark.xfail(reason="known"))
    left_out = [item for item in items if "order_changes_nothing" in item.name]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
"""
COUNT = 4 + len(REWARDS.properties)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "check_mine.py").write_text(NOT_THE_KIT)
    return tmp_path


def test_a_plugin_file_with_everything_right(folder):
    ran = run_kit(folder, "--slime-plugin", "./mine.py")
    assert ran.code == 0, ran.out
    assert not ran.failed
    assert {case.partition("::")[2].partition("[")[0] for case in ran.passed if case.startswith("rewards::")} == {
        prop.name for prop in REWARDS.properties
    }
    assert f"{COUNT} of {COUNT} cases run (entries 4, rewards {len(REWARDS.properties)})" in ran.out


def test_the_authors_own_settings_and_tests_do_not_matter(forked_kit, folder):
    (folder / "pytest.ini").write_text(SETTINGS)
    assert forked_kit(folder).code == 1
    ran = forked_kit(folder, "--slime-plugin", "mine.py")
    assert (ran.code, len(ran.passed)) == (0, COUNT), ran.out


def test_paths_that_are_given_are_run_too(forked_kit, folder):
    (folder / "test_own.py").write_text("def test_own():\n    assert False, 'my own test'\n")
    ran = forked_kit(folder, "--slime-plugin", "mine.py", "test_own.py")
    assert ran.code == 1
    assert len(ran.failed) == 1
    assert len(ran.passed) == COUNT


def test_a_case_that_is_left_out_skipped_or_expected_to_fail_is_a_failure(forked_kit, folder):
    # Its example declares another result, which the other plugin expects to fail.
    (folder / "mine.py").write_text(MINE.replace("-float", "float"))
    (folder / "leaves_out.py").write_text(LEAVES_OUT)
    ran = forked_kit(folder, "--slime-plugin", "mine.py", "-p", "leaves_out", path=[folder])
    assert ran.code == 1
    assert not ran.failed
    for name in ("an_empty_response_is_scored", "order_changes_nothing", "examples_get_their_rewards"):
        assert f"NOT RUN rewards::{name}[mine.py/short]: a case that is left out or skipped counts as failed" in ran.out
    assert f"{COUNT - 3} of {COUNT} cases run" in ran.out


def test_choosing_cases_by_hand_is_not_a_pass(forked_kit, folder):
    ran = forked_kit(folder, "--slime-plugin", "mine.py", "-k", "finite_number")
    assert ran.code == 1
    assert len(ran.passed) == 1
    assert "NOT RUN entries::it_keeps_its_contract[slime.rewards:mine.py/short]" in ran.out


def test_it_runs_spread_over_workers(folder):
    ran = run_kit(folder, "--slime-plugin", "mine.py", "-n", "2")
    assert (ran.code, len(ran.passed)) == (0, COUNT), ran.out


def test_a_failure_names_the_property_and_the_plugin(forked_kit, folder):
    (folder / "mine.py").write_text(MINE.replace("-float(len(sample.response))", "float('nan')"))
    ran = forked_kit(folder, "--slime-plugin", "mine.py")
    assert ran.code == 1
    sentence = "breaks its contract: every_sample_gets_a_finite_number: each sample gets one finite number"
    text = ran.failed["rewards::every_sample_gets_a_finite_number[mine.py/short]"]
    assert "short (slime.rewards, mine.py " in text
    assert sentence in text
    assert 'reward "short"' not in text


STUBBORN = """
import asyncio

from slime_core.contracts.middleware import MiddlewareDriver, RouterMiddleware
from slime_core.plugin import driver


class Stubborn(RouterMiddleware):
    async def __call__(self, request, call_next):
        while True:
            try:
                return await call_next(request)
            except asyncio.CancelledError:
                pass


@driver("slime.middlewares", "stubborn")
class StubbornDriver(MiddlewareDriver):
    @classmethod
    def build(cls, config):
        return Stubborn()
"""


def test_a_plugin_that_cannot_be_cancelled_fails_its_property(forked_kit, folder):
    (folder / "stubborn.py").write_text(STUBBORN)
    ran = forked_kit(
        folder, "--slime-plugin", "stubborn.py", "--slime-time-limit", "2", "-k", "a_cancelled_request_ends"
    )
    assert ran.code == 1
    text = ran.failed["middlewares::a_cancelled_request_ends[stubborn.py/stubborn]"]
    assert "stubborn (slime.middlewares, stubborn.py " in text
    assert "it has not ended within 2 s (--slime-time-limit)" in text


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ("slime-gprot", ['--slime-plugin "slime-gprot": no such distribution is installed', "close match: slime-grpo"]),
        ("pluggy", ['--slime-plugin "pluggy": it is installed and registers nothing']),
        ("nowhere.py", ["nowhere.py: cannot be read: No such file or directory"]),
        ("empty.py", ["empty.py: registers nothing"]),
    ],
)
def test_an_unknown_subject_is_an_error_with_the_installed_ones(forked_kit, tmp_path, asked, messages):
    (tmp_path / "empty.py").write_text("x = 1\n")
    ran = forked_kit(tmp_path, "--slime-plugin", asked)
    assert ran.code == 4
    for part in messages:
        assert part in ran.out
    if not asked.endswith(".py"):
        assert "Installed, with plugins: " in ran.out
        assert "slime-grpo 0." in ran.out


def test_it_costs_nothing_in_a_run_that_does_not_ask_for_it(tmp_path):
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    code = """
        import sys, pytest
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", sys.argv[1]])
        loaded = {name for name in sys.modules if name.startswith("slime_")}
        heavy = {"torch", "numpy", "pydantic", "transformers", "stevedore"} & set(sys.modules)
        print(code.value, sorted(loaded), sorted(heavy))
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code), str(tmp_path)], capture_output=True, text=True, check=True
    )
    last = done.stdout.splitlines()[-1]
    assert last == "0 ['slime_plugin_kit', 'slime_plugin_kit.plugin'] []"


def test_names_are_given_once():
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names)
    for kind in KINDS:
        of_kind = [prop.name for prop in kind.properties]
        assert len(set(of_kind)) == len(of_kind)
        assert all(prop.description and not prop.description.endswith(".") for prop in kind.properties)
