"""Observers: loaded with provenance, checked for problems that pluggy ignores, and named when they fail."""

import dataclasses
import errno
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from slime_core import groups
from slime_core.contracts import hookspecs
from slime_core.contracts.hookspecs import HOOK_NAMES, HookSpecs, Run, RunEnd, RunStart, hookimpl
from slime_core.errors import PluginError, StorageError
from slime_core.registry import Registry
from slime_core.registry.hooks import Hooks

RUN = Run(name="r", run_dir=Path("/runs/r"), config={"seed": 1})
START = RunStart(run=RUN, rollout_id=0, version=0)
END = RunEnd(run=RUN, rollout_id=3, version=3)

OBSERVER = """
from slime_core.contracts.hookspecs import hookimpl
seen = []

@hookimpl
def run_start(event):
    seen.append(event)
"""


class Recorder:
    def __init__(self, log, name, fails=False):
        self.log, self.name, self.fails = log, name, fails

    @hookimpl
    def run_start(self, event):
        self.log.append((self.name, "run_start"))
        if self.fails:
            raise KeyError(self.name)

    @hookimpl
    def run_end(self, event):
        self.log.append((self.name, "run_end"))
        if self.fails:
            raise ValueError(self.name)


def test_every_hook_has_a_spec_and_an_event():
    assert len(HOOK_NAMES) == 17
    for name, event in zip(HOOK_NAMES, hookspecs.EVENTS, strict=True):
        assert list(inspect.signature(getattr(HookSpecs, name)).parameters) == ["event"]
        assert event.__name__ == "".join(word.capitalize() for word in name.split("_"))
        assert event.__dataclass_params__.frozen
        assert event.hook == name


def test_events_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        START.version = 7
    assert get_type_hints(Run)["run_dir"] is Path


def test_installed_modules_are_registered_under_dist_and_name(site):
    site.add("acme-slime", {groups.HOOKS: {"watch": "acme_watch"}}, {"acme_watch": OBSERVER})
    lines = []
    hooks = Hooks.load(Registry(allow=["acme-slime"], trace=lines.append))
    assert hooks.names == ["acme-slime/watch"]
    hooks.emit(START)
    hooks.emit(END)
    assert sys.modules["acme_watch"].seen == [START]
    assert [line.rsplit(" ", 2)[0] for line in lines] == ["hook run_start acme-slime/watch"]


def test_trace_only_if_the_variable_is_set(site):
    site.add("acme-slime", {groups.HOOKS: {"watch": "acme_watch"}}, {"acme_watch": OBSERVER})
    for value, count in [("", 0), ("0", 0), ("1", 1)]:
        lines = []
        environ = {"SLIME_HOOK_TRACE": value, "SLIME_PLUGINS_ALLOW": "acme-slime"}
        Hooks.load(Registry.from_environment(environ=environ, trace=lines.append)).emit(START)
        assert len(lines) == count


def test_the_callers_own_observers_come_along(site):
    site.add("acme-slime", {groups.HOOKS: {"watch": "acme_watch"}}, {"acme_watch": OBSERVER})
    log = []
    hooks = Hooks.load(Registry(allow=["acme-slime"]), own={"slime/console": Recorder(log, "own")})
    hooks.emit(START)
    assert hooks.names == ["acme-slime/watch", "slime/console"]
    assert log == [("own", "run_start")]


def test_two_distributions_may_call_their_observers_alike(site):
    """pluggy's own loader would skip the second without an error."""
    site.add("one-slime", {groups.HOOKS: {"watch": "watch_one"}}, {"watch_one": OBSERVER})
    site.add("two-slime", {groups.HOOKS: {"watch": "watch_two"}}, {"watch_two": OBSERVER})
    hooks = Hooks.load(Registry(allow=["one-slime", "two-slime"]))
    hooks.emit(START)
    assert hooks.names == ["one-slime/watch", "two-slime/watch"]
    assert sys.modules["watch_one"].seen == sys.modules["watch_two"].seen == [START]


def test_one_distribution_with_one_name_twice(site):
    info = site.add("one-slime", {groups.HOOKS: {"watch": "watch_one"}}, {"watch_one": OBSERVER})
    with (info / "entry_points.txt").open("a") as file:
        file.write(f"[{groups.HOOKS}]\nwatch = watch_other\n")
    with pytest.raises(PluginError, match=r"hooks: one-slime 0\.1\.0 registers watch twice"):
        Hooks.load(Registry(allow=["one-slime"]))


def test_one_module_under_two_names(site):
    site.add("one-slime", {groups.HOOKS: {"a": "watch_one", "b": "watch_one"}}, {"watch_one": OBSERVER})
    with pytest.raises(PluginError, match=r"one-slime/b: is the same object as one-slime/a"):
        Hooks.load(Registry(allow=["one-slime"]))


def test_all_broken_modules_are_named_at_once(site):
    site.add("one-slime", {groups.HOOKS: {"a": "watch_bad"}}, {"watch_bad": "import not_there_at_all"})
    site.add("two-slime", {groups.HOOKS: {"b": "watch_gone"}}, version="2.0")
    with pytest.raises(PluginError) as caught:
        Hooks.load(Registry(allow=["one-slime", "two-slime"]))
    first, second = str(caught.value).splitlines()
    assert "a of one-slime 0.1.0 (watch_bad) cannot be imported: the module not_there_at_all is missing" in first
    assert first.endswith("or switch it off with SLIME_PLUGINS_DENY=one-slime.")
    assert "its own module watch_gone is missing" in second


def test_a_denied_observer_is_not_even_imported(site):
    site.add("one-slime", {groups.HOOKS: {"a": "watch_bad"}}, {"watch_bad": "import not_there_at_all"})
    assert Hooks.load(Registry(deny=["one-slime"], allow=["one-slime"])).names == []


class Misspelt:
    @hookimpl
    def step_traned(self, event): ...


class OptionalHook:
    @hookimpl(optionalhook=True)
    def hook_of_a_later_version(self, event): ...


class OtherArgument:
    @hookimpl
    def step_trained(self, step): ...


class Default:
    @hookimpl
    def step_trained(self, event=None): ...


class Async:
    @hookimpl
    async def step_trained(self, event): ...


class Generates:
    @hookimpl
    def step_trained(self, event):
        yield


class Wraps:
    @hookimpl(wrapper=True)
    def step_trained(self, event):
        return (yield)


class Unmarked:
    def step_trained(self, event): ...


class NeedsArguments:
    def __init__(self, path): ...


@pytest.mark.parametrize(
    ("observer", "expected"),
    [
        (Misspelt, "hook module acme/x: unknown hook step_traned; close match: step_trained"),
        (OtherArgument, "Hooks take one parameter, event"),
        (Default, "step_trained has a default for event, which is then never filled"),
        (Async, "step_trained is async or a generator"),
        (Generates, "step_trained is async or a generator"),
        (Wraps, "step_trained is a wrapper"),
        (Unmarked, "no function is marked with slime_core.contracts.hookspecs.hookimpl"),
        (NeedsArguments, "the class cannot be made without arguments"),
    ],
)
def test_an_observer_that_would_never_be_called_is_refused(observer, expected):
    with pytest.raises(PluginError, match="hook module acme/x: ") as caught:
        Hooks({"acme/x": observer})
    assert expected in str(caught.value)


def test_an_optional_hook_may_be_unknown():
    assert Hooks({"acme/x": OptionalHook}).names == ["acme/x"]


def test_an_observers_failure_stops_the_run_and_names_it():
    log = []
    hooks = Hooks({"a/good": Recorder(log, "good"), "b/bad": Recorder(log, "bad", fails=True)})
    with pytest.raises(
        PluginError, match=r"observer .b/bad., run_start: raised KeyError: 'bad' \(.*in run_start"
    ) as caught:
        hooks.emit(START)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "SLIME_PLUGINS_DENY=b" in str(caught.value)


def test_at_run_end_all_observers_are_called_and_all_failures_are_raised_together():
    log = []
    hooks = Hooks({name: Recorder(log, name, fails=name != "b/2") for name in ("a/1", "b/2", "c/3")})
    with pytest.raises(PluginError) as caught:
        hooks.emit(END)
    assert sorted(log) == [("a/1", "run_end"), ("b/2", "run_end"), ("c/3", "run_end")]
    assert 'observer "a/1", run_end: raised ValueError' in str(caught.value)
    assert 'observer "c/3", run_end: raised ValueError' in str(caught.value)
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 2


def test_a_full_disk_at_run_end_silences_no_other_observer():
    log = []

    class Full:
        @hookimpl
        def run_end(self):
            raise OSError(errno.ENOSPC, "no room", "metrics")

    hooks = Hooks({"a/1": Recorder(log, "a/1"), "b/2": Full(), "c/3": Recorder(log, "c/3")})
    with pytest.raises(StorageError):
        hooks.emit(END)
    assert sorted(log) == [("a/1", "run_end"), ("c/3", "run_end")]


def test_a_single_failure_at_run_end_keeps_its_cause():
    hooks = Hooks({"a/1": Recorder([], "a/1", fails=True), "b/2": Recorder([], "b/2")})
    with pytest.raises(PluginError) as caught:
        hooks.emit(END)
    assert isinstance(caught.value.__cause__, ValueError)


def test_interrupts_are_not_swallowed():
    def interrupt(event):
        raise KeyboardInterrupt

    observer = SimpleNamespace(run_start=hookimpl(interrupt))
    with pytest.raises(KeyboardInterrupt):
        Hooks({"a/1": observer}).emit(START)


def test_an_observer_may_leave_the_event_out():
    log = []

    class Counts:
        @hookimpl
        def run_start(self):
            log.append(1)

    Hooks({"a/1": Counts}).emit(START)
    assert log == [1]


def test_no_observers_is_fine():
    Hooks().emit(START)
