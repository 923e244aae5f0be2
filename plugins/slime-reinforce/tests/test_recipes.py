"""The recipes are consistent data, and what they make of a batch: returns or baselines, the KL penalty, whitening."""

from __future__ import annotations

import math
import statistics
from importlib.metadata import entry_points

import numpy as np
import pytest

from slime_core import API_VERSION
from slime_core.algorithm.advantages import AdvantageConfig, compute_advantages_and_returns
from slime_core.config.algo import AlgoConfig
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.algorithm import Recipe
from slime_core.types.batch import TokenColumns

ALGORITHMS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo")


def recipe_of(name):
    return entry_points(group="slime.algorithms")[name].load()


def driver_of(group, name):
    return entry_points(group=group)[name].load()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_belongs_to_a_part_or_to_the_kernel_and_is_valid(name):
    recipe = recipe_of(name)
    kernel_keys = {
        key: value for key, value in recipe.options.items() if key in AlgoConfig.model_fields and "type" not in key
    }
    AlgoConfig(advantage=recipe.advantage, loss=recipe.loss, **kernel_keys)
    left = set(recipe.options) - set(AlgoConfig.model_fields)
    for group, part in (("slime.advantages", recipe.advantage), ("slime.losses", recipe.loss)):
        left -= set(driver_of(group, part).Config.model_fields)
    assert left == set()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_recipes_describe_themselves(name):
    recipe = recipe_of(name)
    assert isinstance(recipe, Recipe)
    assert recipe.api_version == API_VERSION
    assert recipe.summary.endswith(".")
    assert "arXiv:" in recipe.paper
    assert recipe.formula
    assert recipe.differences


@pytest.mark.parametrize(
    ("name", "relative", "advantage", "options"),
    [
        (
            "reinforce_plus_plus",
            "ppo",
            "discounted_return",
            {"normalize_advantages": True, "kl_reward_type": "k1", "kl_loss_type": "k3"},
        ),
        (
            "reinforce_plus_plus_baseline",
            "reinforce_plus_plus",
            "group_baseline",
            {"normalize_advantages": True, "kl_reward_type": "k1", "kl_loss_type": "k3"},
        ),
        ("rloo", "grpo", "leave_one_out", {"kl_loss_type": "k3"}),
    ],
)
def test_what_the_papers_ask_for(name, relative, advantage, options):
    recipe = recipe_of(name)
    assert (recipe.relative, recipe.advantage, recipe.loss) == (relative, advantage, "clip")
    assert recipe.aggregation is Aggregation.SEQ_MEAN
    assert (recipe.filters, recipe.shaping, recipe.corrections, recipe.roles) == ((), (), (), ())
    assert recipe.options == options


# --- What they make of a batch ----------------------------------------------------------------------------------------

# Two prompts. Tool tokens in the middle and at the end, an empty response, a masked sample, one without a reward.
MASKS = [[1, 1, 0, 1], [1, 0], [], [1, 1, 1], [0, 0], [1], [1, 0, 0, 1, 1]]
REWARDS = [1.0, 0.0, 0.5, -1.0, 3.0, math.nan, 0.25]
KEYS = [4, 4, 4, 9, 9, 9, 9]
FLAT = [(sample, t) for sample, mask in enumerate(MASKS) for t in range(len(mask))]


def oracle_whitened(values):
    """Over the trainable tokens of the batch, n - 1."""
    trained = [value for value, (sample, t) in zip(values, FLAT, strict=True) if MASKS[sample][t]]
    mean, std = statistics.fmean(trained), math.sqrt(statistics.variance(trained) + 1e-8)
    return [(v - mean) / std if MASKS[sample][t] else 0.0 for v, (sample, t) in zip(values, FLAT, strict=True)]


def oracle(name, kl, gamma):
    """Advantages before whitening."""
    values = [0.0] * len(FLAT)
    for row, (sample, t) in enumerate(FLAT):
        reward, mask = REWARDS[sample], MASKS[sample]
        if not mask[t] or math.isnan(reward):
            continue
        if name == "reinforce_plus_plus":
            later = [s for s in range(t, len(mask)) if mask[s]]
            penalties = [gamma**n * kl[row - t + s] for n, s in enumerate(later)]
            values[row] = gamma ** (len(later) - 1) * reward - math.fsum(penalties)
            continue
        others = [i for i, key in enumerate(KEYS) if key == KEYS[sample] and not math.isnan(REWARDS[i])]
        if name == "rloo":
            others.remove(sample)
        values[row] = reward - statistics.fmean(REWARDS[i] for i in others)
        if name == "reinforce_plus_plus_baseline":
            values[row] -= kl[row]
    return values


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize(
    ("name", "gamma"),
    [("reinforce_plus_plus", 1.0), ("reinforce_plus_plus", 0.8), ("reinforce_plus_plus_baseline", 1.0), ("rloo", 1.0)],
)
def test_credit_of_a_whole_batch(part, make_batch, name, gamma, kl_coef):
    recipe = recipe_of(name)
    batch = make_batch(REWARDS, MASKS, KEYS)
    rng = np.random.default_rng(1)
    mask = batch.mask.astype(bool)
    old, ref = (rng.normal(-1, 0.5, len(FLAT)).astype(np.float32) for _ in range(2))
    # What is at a tool's tokens may not matter.
    old[~mask], ref[~mask] = np.nan, np.inf
    driver = driver_of("slime.advantages", recipe.advantage)
    with_kl = driver.accepts_kl_penalty and kl_coef > 0
    options = {"gamma": gamma} if "gamma" in driver.Config.model_fields else {}
    rules = AdvantageConfig(
        advantage=part("slime.advantages", recipe.advantage, **options),
        kl_reward=part("slime.kl", recipe.options["kl_reward_type"]) if with_kl else None,
        kl_coef=kl_coef if with_kl else 0.0,
        normalize_advantages=recipe.options.get("normalize_advantages", False),
        aggregation=recipe.aggregation,
        rollouts_per_step=7,
        max_response_len=8,
    )
    made = compute_advantages_and_returns(batch, TokenColumns(old_log_probs=old, ref_log_probs=ref), rules)
    # k1 is the log-ratio itself.
    kl = [kl_coef * (float(o) - float(r)) if with_kl and m else 0.0 for o, r, m in zip(old, ref, mask, strict=True)]
    plain = oracle(name, kl, gamma)
    expected = plain if name == "rloo" else oracle_whitened(plain)
    assert (np.abs(np.array(expected)[mask]) > 0.1).sum() > 5
    np.testing.assert_allclose(made.columns.advantages, np.where(mask, expected, 0.0), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(made.columns.returns, np.where(mask, plain, 0.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_train_nothing(part, make_batch, name):
    recipe = recipe_of(name)
    batch = make_batch([0.1] * 7, MASKS, KEYS)
    rules = AdvantageConfig(
        advantage=part("slime.advantages", recipe.advantage),
        normalize_advantages=recipe.options.get("normalize_advantages", False),
        rollouts_per_step=7,
        max_response_len=8,
    )
    advantages = compute_advantages_and_returns(batch, TokenColumns(), rules).columns.advantages
    np.testing.assert_allclose(advantages, 0.0, atol=1e-9)
