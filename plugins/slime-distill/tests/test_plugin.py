"""The entry points resolve, the options are strict, the recipes name what is there, and listing imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core.config.rollout import RolloutConfig
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.needs import Need


def loaded(group, name):
    return entry_points(group=f"slime.{group}")[name].load()


@pytest.mark.parametrize(("group", "name"), [("advantages", "reverse_kl"), ("losses", "sft"), ("collectors", "sft")])
def test_parts_refuse_unknown_options(group, name):
    driver = loaded(group, name)
    assert driver.Config.model_validate_json(driver.Config().model_dump_json()) == driver.Config()
    with pytest.raises(ValidationError, match="extra"):
        driver.Config(eps_clip=0.2)


def test_what_the_parts_declare():
    reverse_kl, loss, collector = (
        loaded("advantages", "reverse_kl"),
        loaded("losses", "sft"),
        loaded("collectors", "sft"),
    )
    assert reverse_kl.needs == {Need.OLD_LOGPROBS, Need.TEACHER_LOGPROBS}
    assert (reverse_kl.uses_rewards, reverse_kl.accepts_kl_penalty) == (False, False)
    assert not reverse_kl.compares_group(reverse_kl.Config())
    assert (loss.needs, loss.uses_advantages) == (frozenset(), False)
    config = collector.Config()
    assert (collector.needs_engine(config), collector.reads_prompts(config)) == (False, True)


@pytest.mark.parametrize("coefficient", [0, -1, float("nan"), float("inf")])
def test_impossible_coefficients_are_refused(coefficient):
    with pytest.raises(ValidationError):
        loaded("advantages", "reverse_kl").Config(opd_kl_coef=coefficient)


def test_the_recipes():
    opd, sft = (loaded("algorithms", name) for name in ("opd", "sft"))
    assert (opd.advantage, opd.loss, opd.aggregation, opd.collector) == (
        "reverse_kl", "clip", Aggregation.TOKEN_MEAN, None,
    )  # fmt: skip
    assert (sft.advantage, sft.loss, sft.aggregation, sft.collector) == (None, "sft", Aggregation.TOKEN_MEAN, "sft")
    for recipe in (opd, sft):
        assert recipe.paper
        assert recipe.formula
        assert recipe.differences


def test_rollout_settings_that_a_row_of_data_cannot_follow():
    driver = loaded("collectors", "sft")
    fits = RolloutConfig(rollout_batch_size=2, rollout_max_response_len=4)
    assert driver.problems(driver.Config(), fits) == []
    filtered = RolloutConfig(
        rollout_batch_size=2, rollout_max_response_len=4, n_samples_per_prompt=3, filters=("nonzero_std",)
    )
    many, filters = driver.problems(driver.Config(), filtered)
    assert "n_samples_per_prompt = 3" in many
    assert "nonzero_std" in filters


def test_the_plugin_module_imports_nothing_heavy():
    code = "import sys, slime_distill.plugin; print([m for m in ('torch', 'numpy', 'jinja2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
