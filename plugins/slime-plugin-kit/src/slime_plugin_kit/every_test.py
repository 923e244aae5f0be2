"""EveryTestRuns: a suite against a real engine or trainer proves something only if none of it is left out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


class EveryTestRuns:
    """A test with `marker` that is skipped, expected to fail or deselected fails the session, and is named at its end."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._not_run: list[str] = []

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._not_run += [item.nodeid for item in items if item.get_closest_marker(self._marker)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or hasattr(report, "wasxfail"):
            self._not_run.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._not_run.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._not_run and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self._not_run:
            terminalreporter.line(f"NOT RUN {name}: a test that is left out or skipped counts as failed", red=True)
