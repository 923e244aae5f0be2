"""The entry points resolve, the recipe is consistent data, options are strict, and listing them imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core import API_VERSION
from slime_core.config.algo import AlgoConfig
from slime_core.config.roles import LOSS_KEYS
from slime_core.contracts.advantage import AdvantageEstimator
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.loss import PolicyLoss
from slime_core.contracts.needs import Need

PARTS = {("slime.advantages", "gae"): AdvantageEstimator, ("slime.losses", "value"): PolicyLoss}


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
    assert driver.needs == {Need.VALUES}
    with pytest.raises(ValidationError, match="extra"):
        driver.Config(epsilon=0.2)


def test_what_the_parts_declare():
    gae, value = driver_of("slime.advantages", "gae"), driver_of("slime.losses", "value")
    assert gae.accepts_kl_penalty
    assert not gae.compares_group(gae.Config())
    assert value.trains_values
    assert (gae.Config().gamma, gae.Config().lambd, value.Config().value_clip) == (1.0, 1.0, 0.2)


@pytest.mark.parametrize(
    ("group", "name", "options"),
    [
        ("slime.advantages", "gae", {"gamma": 1.1}),
        ("slime.advantages", "gae", {"lambd": -0.1}),
        ("slime.advantages", "gae", {"lambd": float("nan")}),
        ("slime.losses", "value", {"value_clip": 0.0}),
    ],
)
def test_impossible_options_are_refused(group, name, options):
    with pytest.raises(ValidationError):
        driver_of(group, name).Config(**options)


def test_the_recipe():
    recipe = driver_of("slime.algorithms", "ppo")
    assert isinstance(recipe, Recipe)
    assert recipe.api_version == API_VERSION
    assert recipe.summary.endswith(".")
    assert "arXiv:1707.06347" in recipe.paper
    assert recipe.differences
    assert recipe.formula
    assert (recipe.advantage, recipe.loss, recipe.aggregation) == ("gae", "clip", Aggregation.SEQ_MEAN)
    assert recipe.roles == ("critic",)
    assert set(recipe.roles) <= set(LOSS_KEYS)
    assert set(recipe.options) <= set(AlgoConfig.model_fields)
    assert recipe.options["critic_loss"] in entry_points(group="slime.losses").names
    assert {recipe.options["kl_loss_type"], recipe.options["kl_reward_type"]} <= entry_points(group="slime.kl").names
    assert recipe.loss in entry_points(group="slime.losses").names


def test_the_plugin_module_imports_nothing_heavy():
    code = "import sys, slime_ppo.plugin; print([m for m in ('torch', 'numpy', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
