"""Importing one entry: failures carry provenance, other versions and other kinds are refused."""

import json
import os
import subprocess
import sys
import traceback

import pytest

from slime_core import API_VERSION, groups
from slime_core.contracts.filter import BufferFilterDriver, FilterDriver
from slime_core.errors import PluginError
from slime_core.registry import Registry

LOSS = """
from slime_core.contracts.loss import LossDriver

class Mine(LossDriver):
    '''Mine.'''

    @classmethod
    def build(cls, config):
        return object()
"""


def resolve_error(group, name, where="here"):
    with pytest.raises(PluginError) as caught:
        Registry().resolve(group, name, where=where)
    return caught.value


def test_resolves_a_driver_and_traces_it(site):
    site.add("acme-slime", {groups.LOSSES: {"mine": "acme_loss:Mine"}}, {"acme_loss": LOSS})
    lines = []
    resolved = Registry(trace=lines.append).resolve(groups.LOSSES, "mine", where="algo.loss")
    assert resolved.driver is sys.modules["acme_loss"].Mine
    assert resolved.entry.provenance == "acme-slime 0.1.0"
    assert lines[0].startswith("load slime.losses acme-slime/mine 0.1.0 acme_loss:Mine ")


def test_a_missing_dependency_names_plugin_version_and_module_and_chains(site):
    site.add("acme-slime", {groups.LOSSES: {"mine": "acme_broken:Mine"}}, {"acme_broken": "import not_there_at_all"})
    error = resolve_error(groups.LOSSES, "mine", "algo.loss")
    assert str(error).startswith('algo.loss = "mine": mine of acme-slime 0.1.0 (acme_broken:Mine) cannot be imported')
    assert "the module not_there_at_all is missing" in str(error)
    assert isinstance(error.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("assert False, 'odd build'", "AssertionError: odd build"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "AttributeError"),
    ],
)
def test_whatever_an_import_raises_is_reported(site, source, expected):
    site.add("acme-slime", {groups.LOSSES: {"mine": "acme_odd:Mine"}}, {"acme_odd": source})
    error = resolve_error(groups.LOSSES, "mine")
    assert expected in str(error)
    assert error.__cause__ is not None


def test_its_own_module_missing_means_a_damaged_installation(site):
    site.add("acme-slime", {groups.LOSSES: {"mine": "acme_gone.plugin:Mine"}})
    assert "its own module acme_gone is missing. Reinstall acme-slime" in str(resolve_error(groups.LOSSES, "mine"))


@pytest.mark.parametrize(("version", "who"), [(API_VERSION + 1, "slime-rl"), (API_VERSION - 1, "acme-slime")])
def test_the_error_of_another_contract_version_names_what_to_upgrade(site, version, who):
    source = LOSS.replace("'''Mine.'''", f"api_version = {version}")
    site.add("acme-slime", {groups.LOSSES: {"mine": "acme_version:Mine"}}, {"acme_version": source})
    text = str(resolve_error(groups.LOSSES, "mine"))
    assert f"speaks version {version} of the contracts" in text
    assert text.endswith(f"upgrade {who}.")


@pytest.mark.parametrize(
    ("group", "source", "found"),
    [
        (groups.ADVANTAGES, LOSS, "a LossDriver class; slime.advantages takes an AdvantageDriver class or"),
        (groups.ALGORITHMS, LOSS, "a LossDriver class; slime.algorithms takes a Recipe instance"),
        (
            groups.LOSSES,
            "class Mine: pass",
            "the class Mine; slime.losses takes a LossDriver class, or a plain def loss",
        ),
        (groups.LOSSES, "Mine = 3", "an object of type int; slime.losses takes"),
        (
            groups.CORRECTIONS,
            "def Mine(x): pass",
            "the function Mine; slime.corrections takes a CorrectionDriver class",
        ),
        (groups.LOSSES, LOSS + "\nMine = Mine()", "a LossDriver instance; slime.losses takes a LossDriver class"),
    ],
)
def test_the_error_of_the_wrong_kind_names_what_was_found_and_what_is_required(site, group, source, found):
    site.add("acme-slime", {group: {"mine": "acme_kind:Mine"}}, {"acme_kind": source})
    assert found in str(resolve_error(group, "mine"))


def test_a_driver_without_build_is_refused(site):
    source = "from slime_core.contracts.loss import LossDriver\nclass Mine(LossDriver): pass"
    site.add("acme-slime", {groups.LOSSES: {"mine": "acme_abstract:Mine"}}, {"acme_abstract": source})
    assert "does not implement build" in str(resolve_error(groups.LOSSES, "mine"))


def test_expect_narrows_a_group_of_two_kinds(site):
    site.add("acme-slime", {groups.FILTERS: {"keep": "acme_keep:keep"}}, {"acme_keep": "def keep(group): return True"})
    registry = Registry()
    assert registry.resolve(groups.FILTERS, "keep", where="x", expect=FilterDriver)
    with pytest.raises(PluginError, match="a BufferFilterDriver belongs here"):
        registry.resolve(groups.FILTERS, "keep", where="rollout.buffer_filter", expect=BufferFilterDriver)
    # Names of the other kind are no help.
    with pytest.raises(PluginError) as caught:
        registry.resolve(groups.FILTERS, "keeep", where="rollout.buffer_filter", expect=BufferFilterDriver)
    message = str(caught.value)
    assert message.startswith('rollout.buffer_filter = "keeep": unknown buffer filter. Available:')
    assert "pop_first" in message
    assert "acme" not in message
    with pytest.raises(PluginError, match=r'"pop": unknown group filter\. Available: keep'):
        registry.resolve(groups.FILTERS, "pop", where="x", expect=FilterDriver)


STALE = """
import json, sys
from stevedore import _cache
_cache._c._disable_caching = False
from stevedore.named import NamedExtensionManager
seen = NamedExtensionManager("slime.losses", names=[]).entry_points_names()
found = None
if sys.argv[1:]:
    from slime_core.registry import Registry
    found = Registry().resolve("slime.losses", sys.argv[1], where="algo.loss").entry.target
print(json.dumps([seen, found]))
"""


def test_a_plugin_that_stevedores_cache_misses_is_found(site, tmp_path):
    """The cache compares times as float32, 128 s apart at today's dates."""

    def run(*arguments):
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(site.folder)}
        done = subprocess.run([sys.executable, "-c", STALE, *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    scanned = 128 * 13_000_000
    info = site.add("acme-slime", {groups.LOSSES: {"old": "acme_loss:Mine"}}, {"acme_loss": LOSS})
    os.utime(info / "entry_points.txt", (scanned, scanned))
    os.utime(site.folder, (scanned, scanned))
    assert "old" in run()[0]
    site.write_entry_points(info, {groups.LOSSES: {"old": "gone:Mine", "new": "acme_loss:Mine"}})
    os.utime(info / "entry_points.txt", (scanned + 60, scanned + 60))
    seen, target = run("new")
    assert "new" not in seen, "the trap is gone: stevedore saw the change"
    assert target == "acme_loss:Mine"


def test_traceback_of_a_broken_import_shows_the_plugins_line(site):
    site.add("acme-slime", {groups.LOSSES: {"mine": "acme_line:Mine"}}, {"acme_line": "value = 1\nvalue / 0\n"})
    error = resolve_error(groups.LOSSES, "mine")
    assert "value / 0" in "".join(traceback.format_exception(error))
