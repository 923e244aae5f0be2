"""A manifest with an earlier release's names is that of the same run, once its names are today's."""

import copy
import importlib.metadata
import json

import pytest

from slime_core import __version__
from slime_core.controller.earlier_names import Renames, in_todays_names, plugin_today
from slime_core.controller.manifest import build_manifest, recorded_manifest
from slime_core.controller.run_changes import changes_since

RENAMES = Renames(
    entries={"slime.advantages:slime-old/norm": "slime.advantages:slime-grpo/group_norm"},
    distributions={"slime-old": "slime-grpo", "slime-former": "slime-sources"},
    keys={("train", "learning_rate"): ("train", "lr"), ("seeds", "all"): ("seed",)},
    added={("train", "clip_grad"): 1.0, ("critic", "optimizer"): "adam"},
    became_plugins={("rollout", "collector", "name"): {"accepted": "slime.collectors:slime-sources/accepted"}},
    continued={"0.0.": frozenset({"slime-old", "slime-former"})},
)


def of_today(bound, *flags):
    return json.loads(build_manifest(bound(*flags), data_fingerprint="d").to_json())


def of_then(today):
    """The manifest that a release with the names on the left would have written."""
    old = copy.deepcopy(today)
    train = old["config"]["train"]
    train["learning_rate"] = train.pop("lr")
    assert train.pop("clip_grad") == 1.0
    old["config"]["seeds"] = {"all": old["config"].pop("seed")}
    plugins = {
        where: text.replace(f"slime-grpo/group_norm {__version__}", "slime-old/norm 0.0.7")
        .replace(f"slime-grpo/clip {__version__}", "slime-old/clip 0.0.7")
        .replace(f"slime-sources/files {__version__}", "slime-former/files 0.0.7")
        for where, text in today["plugins"].items()
        if "collector" not in where
    }
    assert {"slime.losses:slime-old/clip 0.0.7", "slime.advantages:slime-old/norm 0.0.7"} <= set(plugins.values())
    old["plugins"] = plugins
    old["may_differ"] = [["train", "learning_rate"] if path == ["train", "lr"] else path for path in old["may_differ"]]
    return old | {"fingerprint": "then", "slime_core": "0.0.7"}


def test_the_run_of_an_earlier_release_is_the_same_run(bound):
    today = of_today(bound)
    read = recorded_manifest(of_then(today), RENAMES)
    assert read["config"] == today["config"]
    assert set(read["plugins"].values()) == set(today["plugins"].values())
    assert read["fingerprint"] == today["fingerprint"]


def test_another_run_of_an_earlier_release_is_another_run(bound):
    today = of_today(bound)
    old = of_then(today)
    other = copy.deepcopy(old)
    other["config"]["train"]["learning_rate"] = 0.5
    assert recorded_manifest(other, RENAMES)["fingerprint"] != today["fingerprint"]
    assert recorded_manifest(old | {"data": "others"}, RENAMES)["fingerprint"] != today["fingerprint"]


def test_names_of_today_stay_as_they_are(bound):
    today = of_today(bound)
    assert recorded_manifest(today, RENAMES) == today
    assert recorded_manifest(today) == today
    before = copy.deepcopy(old := of_then(today))
    in_todays_names(old, RENAMES)
    assert old == before, "what was read is changed"


@pytest.mark.parametrize(
    ("then", "now"),
    [
        # A plugin that moved, to a distribution of another version.
        ("slime.sources:slime-core/files 0.1.0", "slime.sources:pytest/files {pytest}"),
        # Another plugin of a renamed distribution.
        ("slime.filters:slime-core/first 0.1.4", "slime.filters:numpy/first {numpy}"),
        # The same name in another group is another plugin.
        ("slime.rewards:slime-core/files 0.1.0", "slime.rewards:numpy/files {numpy}"),
        # Of a version with which a run does not continue.
        ("slime.filters:slime-core/first 0.0.9", "slime.filters:numpy/first 0.0.9"),
        ("slime.filters:slime-core/first 0.10.0", "slime.filters:numpy/first 0.10.0"),
        # A stranger's, a single file's, and one that is gone.
        ("slime.rewards:acme-slime/files 0.1.0", "slime.rewards:acme-slime/files 0.1.0"),
        ("slime.rewards:mine.py/mine ", "slime.rewards:mine.py/mine "),
        ("slime.rewards:slime-gone/any 0.1.0", "slime.rewards:slime-gone/any 0.1.0"),
    ],
)
def test_a_plugin_in_todays_names(then, now):
    renames = Renames(
        entries={"slime.sources:slime-core/files": "slime.sources:pytest/files"},
        distributions={"slime-core": "numpy"},
        continued={"0.1.": frozenset({"slime-core", "slime-gone"})},
    )
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "pytest")}
    assert plugin_today(then, renames) == now.format(**versions)


def test_a_plugin_of_another_version_is_named(bound):
    made = build_manifest(bound(), data_fingerprint="d")
    content = json.loads(made.to_json())
    where = next(where for where, text in content["plugins"].items() if "slime-grpo/clip" in text)
    content["plugins"][where] = "slime.losses:slime-grpo/clip 0.0.1"
    found = recorded_manifest(content | {"fingerprint": "x"})
    assert list(map(str, changes_since(found, made))) == [f"slime-grpo: 0.0.1 -> {__version__}"]


@pytest.mark.parametrize(("launcher", "kept"), [("local", set()), ("ray", {"address", "num_cpus_per_worker"})])
def test_keys_that_are_one_launchers_options_now_are_no_others(launcher, kept):
    table = {"name": launcher, "address": None, "num_cpus_per_worker": 1.0, "device": "auto"}
    content = {"config": {"launcher": table, "train": {"optimizer": "sgd"}}, "plugins": {}}
    today = in_todays_names(content)
    assert today["config"]["launcher"].keys() == {"name", "device"} | kept
    assert today["plugins"] == {"train.optimizer sgd": f"slime.optimizers:slime-training/sgd {__version__}"}


def test_modalities_of_0_1_are_plugins_now():
    def plugins_of(modalities):
        return in_todays_names({"config": {"data": {"multimodal_keys": modalities}}, "plugins": {}})["plugins"]

    version = importlib.metadata.version("slime-models")
    image = {"data.multimodal_keys image": f"slime.media:slime-models/image {version}"}
    assert plugins_of({"image": "pictures"}) == plugins_of({}) | image
    assert "data.multimodal_keys image" not in plugins_of({})


def test_what_rendered_prompts_and_collected_groups_in_the_kernel_are_plugins_now(bound):
    today = of_today(bound)
    then = copy.deepcopy(today)
    del then["config"]["data"]["renderer"], then["plugins"]["data.renderer chat"]
    collector = then["plugins"].pop("rollout.collector accepted")
    then["plugins"]["rollout.collector accepted"] = collector.replace("slime-sources/", "slime-rl/")
    assert collector != then["plugins"]["rollout.collector accepted"]
    assert recorded_manifest(then | {"fingerprint": "then"}) == today


def test_an_option_is_added_to_the_plugins_that_have_it_alone():
    agents = {"name": "mine", "fork_threshold": 8}
    for table, expected in ((agents, {**agents, "ignored_parameters": []}), ({"name": "retool"}, {"name": "retool"})):
        assert in_todays_names({"config": {"generate": table}})["config"]["generate"] == expected
    given = {**agents, "ignored_parameters": ["seed"]}
    assert in_todays_names({"config": {"generate": given}})["config"]["generate"] == given
