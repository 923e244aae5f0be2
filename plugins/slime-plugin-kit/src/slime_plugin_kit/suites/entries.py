"""Every entry point, whatever its kind."""

from __future__ import annotations

import functools

import pytest

from slime_core.config.part import PluginSpec
from slime_core.errors import ConfigError
from slime_core.registry import Registry, bind
from slime_core.registry.entry import Entry
from slime_plugin_kit.case import Case
from slime_plugin_kit.inspection import Finding, inspect_entries

UNKNOWN = "an_option_that_nothing_has"


@functools.cache
def findings(registry: Registry, entries: tuple[Entry, ...]) -> dict[Entry, Finding]:
    """Findings of all entries. Their imports are found in a fresh interpreter for each distribution."""
    return {finding.entry: finding for finding in inspect_entries(registry, entries)}


def test_it_keeps_its_contract(case: Case) -> None:
    finding = findings(case.subject.registry, case.subject.asked)[case.entry]
    assert not finding.problems, "; ".join(finding.problems)


def test_it_has_options_to_try(case: Case) -> None:
    subject = case.subject
    assert not subject.problems, (
        f"{'; '.join(problem.removesuffix('.') for problem in subject.problems)}. Options without a default are given by "
        "an example (slime_core.contracts.example), which the kit then tries"
    )


def test_options_travel_to_workers(case: Case) -> None:
    spec = case.part.spec()
    there = PluginSpec.from_json(spec.to_json()).resolve(case.subject.registry)
    assert there.config == case.config, f"the options arrive as {there.config!r}, they were {case.config!r}"
    built, here = type(there.build()), type(case.build())
    assert built.__qualname__ == here.__qualname__, f"a worker builds a {built.__qualname__}, not a {here.__qualname__}"


def test_unknown_options_are_refused(case: Case) -> None:
    assert case.subject.resolved is not None
    with pytest.raises(ConfigError, match=UNKNOWN):
        bind(case.subject.resolved, {**case.options, UNKNOWN: 1}, where=case.entry.name)
