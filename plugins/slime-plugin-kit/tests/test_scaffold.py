"""What `slime new` writes; that it keeps its contracts is proved with the shipped plugins."""

import tomllib

import pytest

from slime_core.errors import ConfigError, PluginError
from slime_plugin_kit.scaffold import kinds, plan_from, plan_new, write

MINE = """
from slime_core.plugin import hook, reward


@reward("short")
def short_answers(sample):
    return -float(sample.response_length)


@hook
def run_end(event):
    pass
"""


def test_a_plugin_file_becomes_a_distribution(tmp_path):
    (tmp_path / "My_Rewards.py").write_text(MINE)
    plan = plan_from(tmp_path / "My_Rewards.py", None)
    written = write(plan, tmp_path / "new")
    assert {str(path.relative_to(tmp_path / "new")) for path in written} == {
        "pyproject.toml",
        "README.md",
        "src/slime_my_rewards/__init__.py",
        "src/slime_my_rewards/plugin.py",
        "src/slime_my_rewards/py.typed",
        "tests/test_entries.py",
    }
    project = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())["project"]
    assert project["name"] == "slime-my-rewards"
    assert project["entry-points"] == {
        "slime": {"my_rewards": "slime_my_rewards.plugin"},
        "slime.rewards": {"short": "slime_my_rewards.plugin:short_answers"},
    }
    assert (tmp_path / "new" / "src" / "slime_my_rewards" / "plugin.py").read_text() == MINE
    with pytest.raises(PluginError, match="is there already"):
        write(plan, tmp_path / "new")


def test_every_kind_has_a_template_that_names_what_was_asked_for():
    assert kinds() == ["advantage", "algorithm", "filter", "generator", "hook", "loss", "reward", "tracker"]
    plan = plan_new("algorithm", "acme-fast", "acme-things")
    assert (plan.dist, plan.package) == ("acme-things", "acme_things")
    assert plan.entries == {
        "slime.advantages": {"acme-fast-advantage": "acme_fast_advantage"},
        "slime.algorithms": {"acme-fast": "ACME_FAST"},
        "slime.losses": {"acme-fast-loss": "acme_fast_loss"},
    }


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("rewards", "x", "unknown kind; close match: reward"),
        ("reward", "My Reward", "cannot be a name"),
        ("reward", "2nd", "begins with a letter"),
    ],
)
def test_invalid_kinds_and_names_are_errors(kind, name, expected):
    with pytest.raises(ConfigError, match=expected):
        plan_new(kind, name, None)
