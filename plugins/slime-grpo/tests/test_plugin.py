"""The entry points resolve, the options are strict, and listing them imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core import API_VERSION
from slime_core.contracts.advantage import AdvantageEstimator, RewardShaper
from slime_core.contracts.loss import PolicyLoss
from slime_core.contracts.needs import Need

PARTS = {
    ("slime.advantages", "group_norm"): AdvantageEstimator,
    ("slime.advantages", "overlong"): RewardShaper,
    ("slime.losses", "clip"): PolicyLoss,
    ("slime.losses", "sequence_clip"): PolicyLoss,
    ("slime.losses", "cispo"): PolicyLoss,
}


def driver_of(group, name):
    return entry_points(group=group)[name].load()


@pytest.mark.parametrize(("group", "name"), PARTS)
def test_parts_resolve_build_and_refuse_unknown_options(group, name):
    driver = driver_of(group, name)
    config = driver.Config()
    assert driver.api_version == API_VERSION
    assert driver.__doc__
    assert isinstance(driver.build(config), PARTS[group, name])
    assert driver.Config.model_validate_json(config.model_dump_json()) == config
    assert all(field.description for field in driver.Config.model_fields.values())
    with pytest.raises(ValidationError, match="extra"):
        driver.Config(epsilon=0.2)


@pytest.mark.parametrize("name", ["clip", "sequence_clip", "cispo"])
def test_losses_declare_what_they_read(name):
    driver = driver_of("slime.losses", name)
    assert driver.needs == {Need.OLD_LOGPROBS}
    assert driver.sequence_level == (name == "sequence_clip")
    assert driver.uses_advantages
    assert not driver.trains_values


def test_group_norm_takes_no_reward_side_kl():
    driver = driver_of("slime.advantages", "group_norm")
    assert driver.compares_group(driver.Config())
    assert not driver.compares_group(driver.Config(disable_rewards_normalization=True))
    assert not driver.accepts_kl_penalty
    assert driver.needs == frozenset()


@pytest.mark.parametrize(
    ("group", "name", "options"),
    [
        ("slime.losses", "clip", {"eps_clip_c": 1.0}),
        ("slime.losses", "clip", {"eps_clip": 0.0}),
        ("slime.losses", "clip", {"eps_clip": float("nan")}),
        ("slime.losses", "clip", {"eps_clip_high": -0.1}),
        ("slime.losses", "sequence_clip", {"eps_clip_c": 3.0}),
        ("slime.advantages", "overlong", {"overlong_buffer_len": 0}),
        ("slime.advantages", "overlong", {"overlong_penalty_factor": -1.0}),
    ],
)
def test_impossible_options_are_refused(group, name, options):
    with pytest.raises(ValidationError):
        driver_of(group, name).Config(**options)


def test_the_plugin_module_imports_nothing_heavy():
    code = "import sys, slime_grpo.plugin; print([m for m in ('torch', 'numpy', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
