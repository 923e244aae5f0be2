"""A third-party wheel is installed and works by name, without a change of slime."""

import json

import pytest

RESOLVE = """
import json, sys
from slime_core.registry import Registry, bind
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup
import numpy as np

registry = Registry()
reward = registry.resolve("slime.rewards", sys.argv[1], where="reward.name")
prompt = Prompt(group_index=0, text="1+1", token_ids=np.array([1], np.int32), label="2")
samples = tuple(
    Sample(
        index=i, group_index=0, rollout_id=i, prompt=prompt, tokens=np.array([1], np.int32), prompt_length=1,
        loss_mask=np.zeros(0, np.uint8), rollout_log_probs=np.zeros(0, np.float32), response=response,
    )
    for i, response in enumerate(["it is 2", "", "3"])
)
scores = reward.driver.build(reward.driver.Config()).score(SampleGroup(prompt=prompt, samples=samples))
light = "torch" not in sys.modules
advantage = registry.resolve("slime.advantages", "acme_rank", where="algo.advantage")
config = bind(advantage, {"rank_scale": 2}, where="algo")
kl = registry.resolve("slime.kl", "acme_half", where="algo.kl_loss_type").driver
import torch
halves = kl.build(kl.Config())(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
print(json.dumps({
    "from": reward.entry.provenance, "scores": scores, "light": light, "scale": advantage.driver.build(config).scale,
    "halves": halves.tolist(),
}))
"""

HOOKS = """
import sys
from pathlib import Path
from slime_core.registry.hooks import Hooks
from slime_core.contracts.hookspecs import Run, RunEnd, RunStart, StepTrained
from slime_core.registry import Registry
from slime_core.types.report import TrainReport

hooks = Hooks.load(Registry(allow=["acme-slime"]))
run = Run(name="tiny", run_dir=Path(sys.argv[1]), config={})
hooks.emit(RunStart(run=run, rollout_id=0, version=0))
hooks.emit(StepTrained(run=run, rollout_id=0, report=TrainReport(version=1, steps=(), rollout={}, perf={})))
hooks.emit(RunEnd(run=run, rollout_id=1, version=1))
"""


@pytest.fixture(scope="module")
def acme(install_third_party):
    return install_third_party("acme-slime")


@pytest.fixture(scope="module")
def acme_and_rival(install_third_party):
    return install_third_party("acme-slime", "rival-slime")


def listed(installed, **variables):
    done = installed.slime("plugins", "--json", **variables)
    assert done.returncode == 0, done.stderr
    return {(r["group"], r["name"], r["dist"]): r for r in json.loads(done.stdout)}


def test_it_is_listed(acme):
    records = listed(acme)
    mine = {key[:2]: record for key, record in records.items() if key[2] == "acme-slime"}
    assert set(mine) == {
        ("slime", "acme_watch"),
        ("slime.advantages", "acme_rank"),
        ("slime.kl", "acme_half"),
        ("slime.rewards", "acme"),
    }
    assert {record["version"] for record in mine.values()} == {"1.2.3"}
    assert {record["status"] for record in mine.values()} == {"ok"}
    assert mine["slime.rewards", "acme"]["target"] == "acme_slime.plugin:acme"


def test_it_resolves_and_computes(acme):
    done = acme.python(RESOLVE, "acme")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "from": "acme-slime 1.2.3",
        "scores": [1.0, 0.0, 0.0],
        "light": True,
        "scale": 2.0,
        "halves": [0.5, 2.0],
    }


def test_it_is_described(acme):
    done = acme.slime("plugins", "show", "acme_rank", COLUMNS="160")
    assert done.returncode == 0, done.stderr
    assert "from acme-slime 1.2.3: acme_slime.plugin:RankDriver" in done.stdout
    assert "Largest advantage of a group" in done.stdout


def test_it_keeps_its_contracts(acme):
    done = acme.slime("plugins", "--check", "--json", SLIME_PLUGINS_ALLOW="acme-slime,slime-plugin-kit")
    problems = {r["name"]: r["problems"] for r in json.loads(done.stdout) if r["dist"] == "acme-slime"}
    assert problems == {"acme": [], "acme_rank": [], "acme_half": [], "acme_watch": []}


def test_its_observer_gets_every_event(acme, tmp_path):
    done = acme.python(HOOKS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "acme.log").read_text().splitlines() == [
        "run_start tiny",
        "step_trained 0 1",
        "run_end 1 NoneType",
    ]


def test_a_second_distribution_with_the_same_name(acme_and_rival):
    records = listed(acme_and_rival)
    assert records["slime.rewards", "acme", "acme-slime"]["status"] == "duplicate"
    assert records["slime.rewards", "acme", "rival-slime"]["status"] == "duplicate"
    done = acme_and_rival.python(RESOLVE, "acme")
    assert done.returncode == 1
    assert (
        'reward.name = "acme": offered by acme-slime 1.2.3 and rival-slime 0.9. '
        'Set one of them: "acme-slime/acme" or "rival-slime/acme".' in done.stderr
    )


def test_the_qualified_name_picks_one_without_importing_the_other(acme_and_rival):
    done = acme_and_rival.python(RESOLVE, "acme-slime/acme")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["from"] == "acme-slime 1.2.3"


def test_a_broken_one_is_named_with_its_cause(acme_and_rival):
    done = acme_and_rival.python(RESOLVE, "rival-slime/acme")
    assert done.returncode == 1
    assert "acme of rival-slime 0.9 (rival_slime.plugin:acme) cannot be imported" in done.stderr
    assert "the module a_module_that_is_missing is missing" in done.stderr
    checked = acme_and_rival.slime(
        "plugins", "--check", SLIME_PLUGINS_ALLOW="acme-slime,rival-slime,slime-plugin-kit", COLUMNS="200"
    )
    assert checked.returncode == 1
    assert "a_module_that_is_missing" in checked.stdout


def test_without_it_the_name_is_unknown(install_third_party):
    done = install_third_party().python(RESOLVE, "acme")
    assert done.returncode == 1
    assert 'reward.name = "acme": unknown reward' in done.stderr
