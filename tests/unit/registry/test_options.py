"""Binding: every problem at once, each under the path that the user typed."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.loss import LossDriver
from slime_core.contracts.paths import RunPath
from slime_core.errors import ConfigError
from slime_core.registry import Resolved, bind
from slime_core.registry.entry import Entry


class Inner(DriverConfig):
    """Inner."""

    depth: int = 1
    """How deep."""


class Options(DriverConfig):
    """Options."""

    eps_clip: float = Field(0.2, gt=0, lt=1)
    """Half the width of the clip."""
    eps_clip_high: float | None = None
    """Upper side."""
    steps: int
    """How many."""
    mode: Literal["fast", "slow"] = "fast"
    """Which way."""
    inner: Inner = Inner()
    """A table."""
    values: tuple[int | Inner, ...] = ()
    """A list."""
    file: RunPath | None = None
    """A path."""

    @model_validator(mode="after")
    def _check(self):
        if self.steps == 13:
            raise ValueError("steps may not be 13.")
        return self


class Mine(LossDriver):
    Config = Options

    @classmethod
    def build(cls, config):
        return config


RESOLVED = Resolved(Entry("slime.losses", "mine", "acme-slime", "0.1.0", "m:Mine"), Mine)


def problems(options, where="algo"):
    with pytest.raises(ConfigError) as caught:
        bind(RESOLVED, options, where=where)
    return caught.value.problems


def test_binds_and_freezes():
    config = bind(RESOLVED, {"steps": 3, "eps_clip_high": 0.3}, where="algo")
    assert (config.steps, config.eps_clip, config.eps_clip_high) == (3, 0.2, 0.3)
    with pytest.raises(ValidationError, match="frozen"):
        config.steps = 4


def test_relative_paths_are_relative_to_the_run_file():
    assert bind(RESOLVED, {"steps": 1, "file": "a.txt"}, where="x", base=Path("/runs")).file == "/runs/a.txt"


def test_all_problems_at_once_with_the_users_paths():
    found = problems({"eps_clip_hihg": 0.3, "eps_clip": "wide", "mode": "medium"})
    assert found == [
        'algo.eps_clip = "wide": input should be a valid number, unable to parse string as a number.',
        "algo.steps: is missing; acme-slime 0.1.0 needs it (How many).",
        "algo.mode = \"medium\": input should be 'fast' or 'slow'.",
        "algo.eps_clip_hihg: unknown option; close match: eps_clip_high, eps_clip. Options of acme-slime 0.1.0: "
        "eps_clip, eps_clip_high, steps, mode, inner, values, file.",
    ]


def test_nested_paths_and_the_tables_own_names():
    assert problems({"steps": 1, "inner": {"dept": 2}}) == [
        "algo.inner.dept: unknown option; close match: depth. Options of acme-slime 0.1.0: depth."
    ]


def test_union_members_that_pydantic_adds_are_not_shown():
    assert {line.split(" ")[0] for line in problems({"steps": 1, "values": [3, "x"]})} == {"algo.values.1"}


def test_a_rule_over_several_options_is_reported_under_the_table():
    assert problems({"steps": 13}, "roles.critic.algo") == ["roles.critic.algo: steps may not be 13."]


def test_bounds_are_reported_with_the_value():
    assert problems({"steps": 1, "eps_clip": 2}) == ["algo.eps_clip = 2: input should be less than 1."]
