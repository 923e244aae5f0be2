"""The recipes are consistent data: their names lead somewhere and every option has an owner."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from slime_core import API_VERSION
from slime_core.config.algo import AlgoConfig
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.algorithm import Recipe

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")


def recipe_of(name):
    return entry_points(group="slime.algorithms")[name].load()


def drivers_of(recipe):
    advantages = entry_points(group="slime.advantages")
    names = [recipe.advantage, *recipe.shaping]
    return [*(advantages[name].load() for name in names), entry_points(group="slime.losses")[recipe.loss].load()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_belongs_to_a_part_or_to_the_kernel_and_is_valid(name):
    recipe = recipe_of(name)
    left = set(recipe.options) - set(AlgoConfig.model_fields)
    for driver in drivers_of(recipe):
        own = set(driver.Config.model_fields) & set(recipe.options)
        driver.build(driver.Config(**{key: recipe.options[key] for key in own}))
        left -= own
    assert left == set()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_recipes_describe_themselves(name):
    recipe = recipe_of(name)
    assert isinstance(recipe, Recipe)
    assert recipe.api_version == API_VERSION
    assert recipe.summary.endswith(".")
    assert "arXiv:" in recipe.paper
    assert recipe.formula
    assert recipe.relative == ("ppo" if name == "grpo" else "grpo")
    assert recipe.differences
    assert recipe.advantage == "group_norm"
    assert recipe.options["kl_loss_type"] in entry_points(group="slime.kl").names


@pytest.mark.parametrize(
    ("name", "loss", "aggregation", "filters", "options"),
    [
        ("grpo", "clip", Aggregation.SEQ_MEAN, (), {}),
        ("dr_grpo", "clip", Aggregation.CONSTANT, (), {"disable_grpo_std_normalization": True}),
        ("dapo", "clip", Aggregation.TOKEN_MEAN, ("nonzero_std",), {"eps_clip": 0.2, "eps_clip_high": 0.28}),
        ("gspo", "sequence_clip", Aggregation.SEQ_MEAN, (), {"eps_clip": 3e-4, "eps_clip_high": 4e-4}),
        ("cispo", "cispo", Aggregation.SEQ_MEAN, (), {"eps_clip": 1.0, "eps_clip_high": 4.0}),
    ],
)
def test_what_the_papers_ask_for(name, loss, aggregation, filters, options):
    recipe = recipe_of(name)
    assert (recipe.loss, recipe.aggregation, recipe.filters) == (loss, aggregation, filters)
    assert recipe.shaping == ()
    assert recipe.options == {**options, "kl_loss_type": "k3"}
