"""Launchers, before there is anything to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime_core.contracts.launcher import LauncherSetup
from slime_plugin_kit.case import Case
from slime_plugin_kit.event_loop import run


def built(case: Case) -> Iterator[Any]:
    """With and without devices that trainer and engines share."""
    for colocate in (False, True):
        yield case.driver.build_launcher(case.config, LauncherSetup(colocate=colocate))


def test_without_specs_it_starts_nothing(case: Case) -> None:
    for launcher in built(case):

        async def start(launcher: Any = launcher) -> tuple[Any, Any]:
            return await launcher.start_trainers([]), await launcher.start_engines([])

        ranks, (engines, infos) = run(start())
        assert not ranks, f"no spec, and {len(ranks)} ranks"
        assert not engines, f"no spec, and {len(engines)} engines"
        assert not infos, f"no spec, and {len(infos)} infos of engines"
        run(launcher.stop())


def test_it_can_be_stopped_at_any_time(case: Case) -> None:
    for launcher in built(case):
        for _ in range(2):
            run(launcher.stop())
