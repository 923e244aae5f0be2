"""ContractKit: pytest's hooks, once plugins were asked for. It makes the cases, names what a failure broke, and fails
the session where a case of the list has not run."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from slime_plugin_kit import suites
from slime_plugin_kit.case import Case, Subject
from slime_plugin_kit.kind import Kind, Property
from slime_plugin_kit.kinds import ENTRIES, KINDS
from slime_plugin_kit.subjects import subjects_of
from slime_plugin_kit.time_limit import TimeIsUp, time_limit

SUITES: Final = Path(suites.__file__).parent
MARK: Final = "slime contract"
"""Name of the report property that has the case, also in reports of pytest-xdist workers."""
SHOWN: Final = 20
"""Lost cases that are listed one by one."""


@dataclass(frozen=True, eq=False)
class Asked:
    """One property of one case."""

    kind: Kind
    prop: Property
    case: Case

    @property
    def id(self) -> str:
        # One distribution may give one name in several groups.
        return f"{self.case.entry.group}:{self.case.id}" if self.kind is ENTRIES else self.case.id

    @property
    def name(self) -> str:
        return f"{self.kind.name}::{self.prop.name}[{self.id}]"


class Suite(pytest.Module):
    """A module of this package, whatever the author's own settings call a test."""

    def funcnamefilter(self, name: str) -> bool:
        return name.startswith("test_")


class ContractKit:
    def __init__(self, subjects: Sequence[Subject], folder: tempfile.TemporaryDirectory[str]) -> None:
        self._subjects = subjects
        self._folder = folder
        self._asked: Mapping[str, Asked] = {asked.name: asked for asked in asked_of(subjects)}
        self._ran: set[str] = set()

    @classmethod
    def of(cls, plugins: Sequence[str], config: pytest.Config) -> ContractKit:
        """PluginError if one of `plugins` is not installed or registers nothing."""
        folder = tempfile.TemporaryDirectory(prefix="slime-contract-kit-")
        kit = cls(subjects_of(plugins, config.invocation_params.dir, Path(folder.name)), folder)
        given = config.args if config.args_source is config.ArgsSource.ARGS else []
        config.args[:] = [*(path for path in given if path != str(SUITES)), str(SUITES)]
        return kit

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        """The suites of the kinds that are there."""
        if file_path.parent != SUITES or file_path.stem not in {asked.kind.name for asked in self._asked.values()}:
            return None
        suite: Suite = Suite.from_parent(parent, path=file_path)
        return suite

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: pytest.Collector, name: str, obj: object) -> Any:
        """A property that applies to no case is not collected."""
        if kind_of(collector) is None or not name.startswith("test_"):
            return None
        return None if self._cases(collector, name) else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        module = metafunc.definition.getparent(pytest.Module)
        if module is not None and kind_of(module) is not None:
            cases = self._cases(module, metafunc.function.__name__)
            metafunc.parametrize("case", [asked.case for asked in cases], ids=[asked.id for asked in cases])

    def _cases(self, module: pytest.Collector, function: str) -> list[Asked]:
        kind = kind_of(module)
        name = function.removeprefix("test_")
        if kind is not None and name not in {prop.name for prop in kind.properties}:
            raise pytest.UsageError(f"slime_plugin_kit: {kind.name}.py tests {name}, which no property is called")
        return [asked for asked in self._asked.values() if asked.kind is kind and asked.prop.name == name]

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        asked = self._asked_by(item)
        if asked is not None:
            item.user_properties.append((MARK, asked.name))

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        asked = self._asked_by(pyfuncitem)
        if asked is None:
            return (yield)
        try:
            with time_limit(pyfuncitem.config.getoption("slime_time_limit")):
                return (yield)
        except TimeIsUp as late:
            # As it is, pytest would take it for Ctrl-C.
            raise AssertionError(f"{headline(asked)}: {late}") from late
        except Exception as error:
            error.add_note(headline(asked))
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        asked = self._asked_by(item)
        crash = getattr(report.longrepr, "reprcrash", None)
        if asked is not None and report.failed and crash is not None:
            # The short summary shows its first line.
            crash.message = f"{headline(asked)}\n{crash.message}"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = dict(report.user_properties).get(MARK)
        if isinstance(name, str) and (report.failed or (report.when == "call" and report.passed)):
            self._ran.add(name)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._lost(session.config) and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        lost = self._lost(config)
        terminalreporter.section("slime's contract kit")
        for subject in self._subjects:
            names = [name for name, asked in self._asked.items() if asked.case.subject is subject]
            of_kind = Counter(self._asked[name].kind.name for name in names)
            terminalreporter.line(
                f"{subject.entry.group} {subject.entry.name} ({subject.entry.provenance}): "
                f"{sum(name in self._ran for name in names)} of {len(names)} cases run "
                f"({', '.join(f'{kind} {count}' for kind, count in of_kind.items())})"
            )
        for name in lost[:SHOWN]:
            terminalreporter.line(f"NOT RUN {name}: a case that is left out or skipped counts as failed", red=True)
        if len(lost) > SHOWN:
            terminalreporter.line(f"NOT RUN: {len(lost) - SHOWN} more", red=True)

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()

    def _lost(self, config: pytest.Config) -> list[str]:
        # A worker of pytest-xdist runs only its share; the process that collects the reports has the hook too.
        if config.option.collectonly or hasattr(config, "workerinput"):
            return []
        return [name for name in self._asked if name not in self._ran]

    def _asked_by(self, item: pytest.Item) -> Asked | None:
        callspec = getattr(item, "callspec", None)
        kind = kind_of(item.getparent(pytest.Module))
        if kind is None or callspec is None:
            return None
        name = getattr(item, "originalname", item.name).removeprefix("test_")
        return self._asked[f"{kind.name}::{name}[{callspec.id}]"]


def asked_of(subjects: Sequence[Subject]) -> list[Asked]:
    """Everything that has to be proven of these."""
    asked = []
    for kind in KINDS:
        for subject in filter(kind.holds, subjects):
            for prop in kind.properties:
                # A subject that cannot be bound stays, so that its error is reported.
                tried = subject.cases or ((subject.itself,) if kind is ENTRIES and prop.once else ())
                cases = [case for case in tried if prop.applies(case)]
                if prop.once:
                    cases = [subject.itself] if cases else []
                asked += [Asked(kind, prop, case) for case in cases]
    return asked


def kind_of(collector: pytest.Collector | None) -> Kind | None:
    """The kind whose suite a module is; None if it is no suite of the kit."""
    path = getattr(collector, "path", None)
    if path is None or path.parent != SUITES:
        return None
    return next((kind for kind in KINDS if kind.name == path.stem), None)


def headline(asked: Asked) -> str:
    entry = asked.case.entry
    return f"{entry.name} ({entry.group}, {entry.provenance}) breaks its contract: {asked.prop.name}: {asked.prop.description}"
