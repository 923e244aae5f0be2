"""A session with `--every-test-runs` that leaves a test out fails, however the test was left out."""

from types import SimpleNamespace

import pytest

from slime_plugin_kit.every_test import EveryTestRuns


def ended(*reports, deselected=(), status=pytest.ExitCode.OK):
    watch = EveryTestRuns("real")
    watch.pytest_deselected([item(name, marker) for name, marker in deselected])
    for report in reports:
        watch.pytest_runtest_logreport(report)
    session = SimpleNamespace(exitstatus=status)
    watch.pytest_sessionfinish(session)
    lines = []
    watch.pytest_terminal_summary(SimpleNamespace(line=lambda text, red: lines.append(text.split()[2].strip(":"))))
    return session.exitstatus, lines


def item(name, marker):
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda asked: marker if asked == marker else None)


def report(name, skipped=False, **more):
    return SimpleNamespace(nodeid=name, skipped=skipped, **more)


def test_what_is_left_out_fails_the_session():
    failed = pytest.ExitCode.TESTS_FAILED
    assert ended(report("a")) == (pytest.ExitCode.OK, [])
    assert ended(report("a"), report("b", skipped=True)) == (failed, ["b"])
    assert ended(report("a", wasxfail="known")) == (failed, ["a"])
    assert ended(deselected=[("c", "real"), ("d", "other")]) == (failed, ["c"])
    # Why it has ended otherwise stays.
    assert ended(report("b", skipped=True), status=pytest.ExitCode.INTERRUPTED)[0] is pytest.ExitCode.INTERRUPTED
