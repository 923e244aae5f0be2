"""Listing and finding plugins: no import, the right provenance, clear errors."""

import sys

import pytest

from slime_core import groups
from slime_core.errors import PluginError
from slime_core.registry import Registry, Status
from slime_core.registry.entry import Entry, by_distribution

BOMB = "raise SystemExit('imported')"


def test_entries_carry_provenance_and_are_sorted(site):
    site.add("acme-slime", {groups.REWARDS: {"zeta": "acme_bomb:Z", "alpha": "acme_bomb:A"}}, {"acme_bomb": BOMB})
    site.add("beta-slime", {groups.REWARDS: {"alpha": "acme_bomb:B"}}, version="2.5")
    mine = [e for e in Registry().entries(groups.REWARDS) if e.dist in ("acme-slime", "beta-slime")]
    assert mine == [
        Entry(groups.REWARDS, "alpha", "acme-slime", "0.1.0", "acme_bomb:A"),
        Entry(groups.REWARDS, "alpha", "beta-slime", "2.5", "acme_bomb:B"),
        Entry(groups.REWARDS, "zeta", "acme-slime", "0.1.0", "acme_bomb:Z"),
    ]
    assert "acme_bomb" not in sys.modules


def test_the_whole_listing_is_sorted_by_group_name_distribution(site):
    site.add("acme-slime", {groups.TRACKERS: {"a": "m:A"}, groups.BACKENDS: {"b": "m:B"}})
    listed = [(e.group, e.name, e.dist) for e in Registry().entries()]
    assert listed == sorted(listed)
    assert (groups.BACKENDS, "b", "acme-slime") in listed


def test_a_plugin_may_have_groups_of_its_own(site):
    site.add("acme-slime", {"acme_slime.bridges": {"tiny": "acme_bridge:TINY"}}, {"acme_bridge": "TINY = object()"})
    resolved = Registry().resolve("acme_slime.bridges", "tiny", where="backend.bridge")
    assert resolved.loaded is sys.modules["acme_bridge"].TINY


def test_groups_of_other_projects_are_ignored(site):
    site.add("acme-slime", {"console_scripts": {"x": "m:x"}, groups.REWARDS: {"x": "m:x"}})
    assert {e.group for e in Registry().entries() if e.dist == "acme-slime"} == {groups.REWARDS}


def test_a_leftover_metadata_folder_is_not_a_duplicate(site):
    site.add("acme-slime", {groups.REWARDS: {"x": "m:x"}})
    leftover = site.add("acme-slime", {groups.REWARDS: {"x": "m:x"}}, version="0.0.9")
    leftover.rename(leftover.with_name("~cme_slime-0.0.9.dist-info"))
    assert len([e for e in Registry().entries(groups.REWARDS) if e.name == "x"]) == 1


def test_the_error_of_an_unknown_name_lists_known_names_by_distribution(site):
    site.add("acme-slime", {groups.COLLECTORS: {"beta": "m:B", "alfa": "m:A"}})
    site.add("other-slime", {groups.COLLECTORS: {"gamma": "m:C"}}, version="3.0")
    with pytest.raises(PluginError) as caught:
        Registry().find(groups.COLLECTORS, "alpa", where="rollout.collector.name")
    text = str(caught.value)
    assert text.startswith('rollout.collector.name = "alpa": unknown collector; close match: alfa')
    assert "alfa, beta (acme-slime 0.1.0);" in text
    assert "gamma (other-slime 3.0)" in text


def test_by_distribution_reads_like_a_list():
    entries = [
        Entry("g", "ppo", "b-dist", "0.2", "m:P"),
        Entry("g", "two", "a-dist", "0.1.0", "m:T"),
        Entry("g", "one", "a-dist", "0.1.0", "m:O"),
    ]
    assert by_distribution(entries) == "one, two (a-dist 0.1.0); ppo (b-dist 0.2)"


def test_the_error_of_a_known_but_missing_name_names_the_package(site, monkeypatch):
    monkeypatch.setattr("slime_core.registry.registry.installed_entries", dict)
    with pytest.raises(PluginError, match=r"Available: none\. gspo comes with slime-grpo: pip install slime-grpo\."):
        Registry().find(groups.ALGORITHMS, "gspo", where="algo.name")


def test_a_name_of_another_group_is_pointed_out(site):
    site.add("acme-slime", {groups.LOSSES: {"acme_only": "m:A"}})
    with pytest.raises(PluginError, match=r'"acme_only" is the name of a loss \(acme-slime 0\.1\.0\)\.$'):
        Registry().find(groups.ADVANTAGES, "acme_only", where="algo.advantage")


@pytest.mark.parametrize("middle", [(), ("mid",)], ids=["adjacent", "apart"])
def test_two_distributions_with_one_name_fail_only_when_it_is_used(site, middle):
    """stevedore groups without sorting, so it finds equal names only if they are adjacent, and only after it has imported
    both."""
    site.add("one-slime", {groups.KL: {"twin": "bomb_one:K"}}, {"bomb_one": BOMB})
    if middle:
        site.add("mid-slime", {groups.KL: dict.fromkeys(middle, "bomb_mid:K")}, {"bomb_mid": BOMB})
    site.add("two-slime", {groups.KL: {"twin": "bomb_two:K"}}, {"bomb_two": BOMB}, version="0.2.0")
    registry = Registry()
    with pytest.raises(PluginError) as caught:
        registry.resolve(groups.KL, "twin", where="algo.kl_loss_type")
    assert str(caught.value) == (
        'algo.kl_loss_type = "twin": offered by one-slime 0.1.0 and two-slime 0.2.0. '
        'Set one of them: "one-slime/twin" or "two-slime/twin".'
    )
    assert not {"bomb_one", "bomb_mid", "bomb_two"} & set(sys.modules)
    status = {(e.dist, e.name): s for e, s in registry.listing()}
    assert status["one-slime", "twin"] == status["two-slime", "twin"] == Status.DUPLICATE
    assert all(status["mid-slime", name] == Status.OK for name in middle)


def test_a_qualified_name_picks_one_and_imports_only_that(site):
    good = "def keep(group): return True"
    site.add("one-slime", {groups.FILTERS: {"twin": "bomb_one:keep"}}, {"bomb_one": BOMB})
    site.add("two-slime", {groups.FILTERS: {"twin": "good_two:keep"}}, {"good_two": good})
    resolved = Registry().resolve(groups.FILTERS, "two_slime/twin", where="rollout.filters[0]")
    assert resolved.entry.qualified == "two-slime/twin"
    assert "bomb_one" not in sys.modules


def test_one_distribution_that_registers_a_name_twice_is_named(site):
    info = site.add("acme-slime", {groups.KL: {"k": "m:A"}})
    with (info / "entry_points.txt").open("a") as file:
        file.write(f"[{groups.KL}]\nk = m:B\n")
    with pytest.raises(PluginError, match=r"acme-slime 0\.1\.0 registers it 2 times \(m:A, m:B\)"):
        Registry().find(groups.KL, "acme-slime/k", where="x")


def test_deny_and_allow_lists(site):
    site.add("acme-slime", {groups.REWARDS: {"a": "m:A"}})
    site.add("beta-slime", {groups.REWARDS: {"b": "m:B"}})
    denied = Registry.from_environment(environ={"SLIME_PLUGINS_DENY": "Acme_Slime"})
    assert [e.name for e in denied.entries(groups.REWARDS) if e.dist in ("acme-slime", "beta-slime")] == ["b"]
    assert Status.OFF in {s for e, s in denied.listing() if e.dist == "acme-slime"}
    with pytest.raises(
        PluginError, match=r"acme-slime 0\.1\.0 offers it, but SLIME_PLUGINS_DENY switches acme-slime off"
    ):
        denied.find(groups.REWARDS, "a", where="reward.name")
    allowed = Registry.from_environment(environ={"SLIME_PLUGINS_ALLOW": "acme-slime, "})
    assert {e.dist for e in allowed.entries()} <= {"acme-slime", "slime-rl"}
    with pytest.raises(PluginError, match=r"beta-slime is not in SLIME_PLUGINS_ALLOW"):
        allowed.find(groups.REWARDS, "b", where="reward.name")


def test_a_denied_twin_leaves_no_conflict(site):
    site.add("one-slime", {groups.KL: {"twin": "m:A"}})
    site.add("two-slime", {groups.KL: {"twin": "m:B"}})
    assert Registry(deny=["one-slime"]).find(groups.KL, "twin", where="x").dist == "two-slime"


def test_a_misspelt_list_is_an_error(site):
    site.add("acme-slime", {groups.REWARDS: {"a": "m:A"}})
    with pytest.raises(PluginError, match=r'SLIME_PLUGINS_DENY: no installed distribution "acme-slim" .*: acme-slime'):
        Registry.from_environment(environ={"SLIME_PLUGINS_DENY": "acme-slim"})


def test_a_misspelt_group_is_listed_as_unknown(site):
    site.add("acme-slime", {"slime.reward": {"a": "m:A"}})
    assert [s for e, s in Registry().listing() if e.dist == "acme-slime"] == [Status.UNKNOWN_GROUP]
