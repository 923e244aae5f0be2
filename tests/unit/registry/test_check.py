"""The check: one finding per entry, with every breach of its contract."""

import pytest

from slime_core import groups
from slime_core.registry import Registry
from slime_plugin_kit.inspection import inspect_entries

HEAD = """
from pydantic import ConfigDict, Field
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.loss import LossDriver

class Good(LossDriver):
    '''Good.'''
    @classmethod
    def build(cls, config): ...
"""


def check(site, entry_points, source, **options):
    site.add("acme-slime", entry_points, {"acme_check": HEAD + source}, **options)
    findings = inspect_entries(Registry(allow=["acme-slime"]))
    return {(f.entry.group, f.entry.name): f.problems for f in findings if f.entry.dist == "acme-slime"}


def loss_problems(site, source):
    (problems,) = check(site, {groups.LOSSES: {"mine": "acme_check:Mine"}}, source).values()
    return problems


def with_config(body):
    indented = body.replace("\n", "\n    ")
    return f"class MineConfig(DriverConfig):\n    {indented}\nclass Mine(Good):\n    Config = MineConfig\n"


def test_a_good_plugin_has_no_problems(site):
    source = with_config("eps: float = Field(0.2, gt=0)\n'''Width.'''\nnames: tuple[str, ...] = ('a',)\n'''Names.'''")
    source += """
MINE = Recipe(summary="Mine.", paper="None.", advantage="flat", loss="mine")
def flat(inputs): ...
"""
    found = check(
        site,
        {
            groups.LOSSES: {"mine": "acme_check:Mine"},
            groups.ADVANTAGES: {"flat": "acme_check:flat"},
            groups.ALGORITHMS: {"mine": "acme_check:MINE"},
            groups.HOOKS: {"watch": "acme_check:Watch"},
        },
        source
        + "from slime_core.contracts.hookspecs import hookimpl\n"
        + "class Watch:\n    @hookimpl\n    def run_end(self, event): ...\n",
    )
    assert found == dict.fromkeys(found, ())
    assert len(found) == 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("eps: float = 0.2", "MineConfig has no docstring under eps"),
        ("model_config = ConfigDict(extra='allow')", "does not forbid unknown options"),
        ("model_config = ConfigDict(frozen=False)", "is not frozen"),
        ("eps: float = 'wide'\n'''Width.'''", "the defaults of MineConfig do not survive JSON"),
        ("eps: object = object()\n'''Width.'''", "the defaults of MineConfig do not survive JSON"),
        ("eps: object = (1, 2)\n'''Width.'''", "the defaults of MineConfig come back from JSON as"),
    ],
)
def test_config_contract(site, config, expected):
    (problem,) = loss_problems(site, with_config(config))
    assert expected in problem


def test_a_config_may_ask_for_one_of_several_options(site):
    rule = "low: int | None = None\n'''Low.'''\n@model_validator(mode='after')\ndef _one(self):\n"
    rule += "    if self.low is None:\n        raise ValueError('give low')\n    return self"
    assert loss_problems(site, "from pydantic import model_validator\n" + with_config(rule)) == ()


def test_config_must_be_a_driver_config(site):
    (problem,) = loss_problems(site, "class Mine(Good):\n    class Config: ...\n")
    assert "Mine.Config is not a subclass of slime_core.contracts.driver.DriverConfig" in problem


def test_import_failures_and_kinds_are_findings_not_crashes(site):
    found = check(
        site,
        {
            groups.LOSSES: {"gone": "acme_check:Nothing", "exits": "acme_exit:X"},
            groups.KL: {"loss": "acme_check:Good"},
            groups.REWARDS: {"big!": "acme_check:Good"},
            "slime.reward": {"x": "acme_check:Good"},
            groups.HOOKS: {"silent": "acme_check"},
        },
        "",
    )
    assert "cannot be imported: AttributeError" in found[groups.LOSSES, "gone"][0]
    assert "its own module acme_exit is missing" in found[groups.LOSSES, "exits"][0]
    assert "is a LossDriver class; slime.kl takes a KlDriver class" in found[groups.KL, "loss"][0]
    assert '"big!" is not a name that users can type' in found[groups.REWARDS, "big!"][0]
    assert found["slime.reward", "x"] == ("nothing reads the group slime.reward; close match: slime.rewards",)
    assert "no function is marked" in found[groups.HOOKS, "silent"][0]


def test_heavy_imports_are_found_in_a_fresh_interpreter(site):
    """torch is in this process already, so only another interpreter shows it."""
    site.add(
        "acme-slime", {groups.LOSSES: {"mine": "acme_heavy:Good"}}, {"acme_heavy": "import ray_like, torch\n" + HEAD}
    )
    (site.folder / "ray_like.py").write_text("")
    (site.folder / "torch.py").write_text("")
    (finding,) = [f for f in inspect_entries(Registry(allow=["acme-slime"])) if f.entry.dist == "acme-slime"]
    assert finding.problems == ("importing acme_heavy imports torch: move that into build()",)


def test_a_module_that_exits_at_import_is_one_finding(site):
    site.add("acme-slime", {groups.LOSSES: {"mine": "acme_dies:X"}}, {"acme_dies": "import os\nraise SystemExit(0)"})
    (finding,) = [f for f in inspect_entries(Registry(allow=["acme-slime"])) if f.entry.dist == "acme-slime"]
    assert "SystemExit: 0" in finding.problems[0]


def test_a_recipe_must_name_parts_that_exist(site):
    source = 'MINE = Recipe(summary="Mine.", paper="", advantage="not_there", loss="clips")\n'
    found = check(
        site,
        {groups.ALGORITHMS: {"mine": "acme_check:MINE"}, groups.LOSSES: {"clipped": "acme_check:Good"}},
        source,
    )
    paper, advantage, loss = found[groups.ALGORITHMS, "mine"]
    assert paper == "the recipe's paper is empty"
    assert advantage.startswith('advantage = "not_there": unknown advantage')
    assert loss.startswith('loss = "clips": unknown loss; close match: clipped')


def test_a_recipe_must_name_a_loss_for_each_of_its_roles(site):
    source = """
def flat(inputs): ...
def recipe(*roles, **options):
    return Recipe(summary="Mine.", paper="None.", advantage="flat", loss="mine", roles=roles, options=options)
GOOD, NONE = recipe("critic", critic_loss="mine"), recipe("critic")
WRONG, OTHER = recipe("critic", critic_loss="mined"), recipe("judge")
"""
    found = check(
        site,
        {
            groups.LOSSES: {"mine": "acme_check:Good"},
            groups.ADVANTAGES: {"flat": "acme_check:flat"},
            groups.ALGORITHMS: {name: f"acme_check:{name.upper()}" for name in ("good", "none", "wrong", "other")},
        },
        source,
    )
    good, none, wrong, other = (found[groups.ALGORITHMS, name] for name in ("good", "none", "wrong", "other"))
    assert good == ()
    assert none == ("the recipe trains a critic, and its options have no critic_loss",)
    assert wrong[0].startswith('critic_loss = "mined": unknown loss; close match: mine')
    assert other == ('the recipe trains a role "judge"; there is critic',)


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        (None, "acme-slime does not depend on slime-rl: add a range"),
        ("slime-rl>=7", "acme-slime asks for slime-rl>=7, but slime-rl"),
    ],
)
def test_the_required_slime_core_is_checked(site, requires, expected):
    found = check(site, {groups.LOSSES: {"mine": "acme_check:Good"}}, "", requires=requires)
    (problem,) = found[groups.LOSSES, "mine"]
    assert expected in problem


def test_plugin_files_are_checked_too_but_may_import_anything(site, tmp_path):
    path = tmp_path / "quick.py"
    path.write_text(
        "import torch\nfrom slime_core.plugin import kl, reward\n@kl('a')\ndef a(x, y): return x - y\n"
        "@reward('b')\ndef b(one, two): return 0.0\n"
    )
    found = {
        f.entry.name: f.problems for f in inspect_entries(Registry([path], allow=[])) if f.entry.dist == "quick.py"
    }
    assert found["a"] == ()
    assert "the function b(one, two) has other parameters" in found["b"][0]
