"""The entry points resolve, the options are strict, and listing them imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core import API_VERSION
from slime_core.contracts.advantage import AdvantageDriver, AdvantageEstimator

ADVANTAGES = ("discounted_return", "group_baseline", "leave_one_out")


def driver_of(name):
    return entry_points(group="slime.advantages")[name].load()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_parts_resolve_build_and_refuse_unknown_options(name):
    driver = driver_of(name)
    config = driver.Config()
    assert issubclass(driver, AdvantageDriver)
    assert driver.api_version == API_VERSION
    assert driver.__doc__
    assert driver.needs == frozenset()
    assert isinstance(driver.build(config), AdvantageEstimator)
    assert driver.Config.model_validate_json(config.model_dump_json()) == config
    assert all(field.description for field in driver.Config.model_fields.values())
    with pytest.raises(ValidationError, match="extra"):
        driver.Config(lambd=0.2)


def test_which_compare_and_which_take_a_reward_side_kl():
    assert not driver_of("discounted_return").compares_group(driver_of("discounted_return").Config())
    for name in ("group_baseline", "leave_one_out"):
        driver = driver_of(name)
        assert driver.compares_group(driver.Config())
        assert not driver.compares_group(driver.Config(disable_rewards_normalization=True))
    assert [driver_of(name).accepts_kl_penalty for name in ADVANTAGES] == [True, True, False]


@pytest.mark.parametrize("gamma", [-0.1, 1.01, float("nan"), float("inf")])
def test_impossible_discounts_are_refused(gamma):
    with pytest.raises(ValidationError):
        driver_of("discounted_return").Config(gamma=gamma)


def test_the_plugin_module_imports_nothing_heavy():
    code = "import sys, slime_reinforce.plugin; print([m for m in ('torch', 'numpy', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
