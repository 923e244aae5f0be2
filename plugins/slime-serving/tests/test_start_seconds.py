"""Seconds of a start by a log whose lines may lack the year."""

import re
from dataclasses import replace
from datetime import datetime

import pytest

from slime_serving.server_process import LogFormat, start_seconds

WITHOUT_YEAR = LogFormat(
    stamp=re.compile("^$"),
    fatal="fatal",
    clock="%m-%d %H:%M:%S",
    imported=re.compile(r"INFO (\d\d-\d\d \d\d:\d\d:\d\d) ready"),
)
WITH_YEAR = LogFormat(
    stamp=re.compile("^$"),
    fatal="fatal",
    clock="%Y-%m-%d %H:%M:%S",
    imported=re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] ready"),
)


@pytest.mark.parametrize(
    ("began", "line", "form", "seconds"),
    [
        (datetime(2027, 3, 1, 10, 0, 0), "INFO 03-01 10:00:30 ready", WITHOUT_YEAR, 30.0),
        (datetime(2028, 2, 29, 10, 0, 0), "INFO 02-29 10:00:30 ready", WITHOUT_YEAR, 30.0),
        (datetime(2027, 12, 31, 23, 59, 50), "INFO 01-01 00:00:20 ready", WITHOUT_YEAR, 30.0),
        # The log has no fractions of a second.
        (datetime(2027, 3, 1, 10, 0, 0, 900_000), "INFO 03-01 10:00:00 ready", WITHOUT_YEAR, 0.0),
        # No such day in this year or the next.
        (datetime(2026, 3, 1, 10, 0, 0), "INFO 02-29 10:00:30 ready", WITHOUT_YEAR, 0.0),
        (datetime(2027, 12, 31, 23, 59, 50), "[2028-01-01 00:00:20] ready", WITH_YEAR, 30.0),
    ],
)
def test_imports_end_at_the_lines_time(began, line, form, seconds):
    assert start_seconds([line], form, began.timestamp()) == {"imports": pytest.approx(seconds)}


@pytest.mark.parametrize(
    ("opened", "loading", "parts"),
    [
        (None, None, {"imports": 30.0, "load": 4.0}),
        (50.0, None, {"imports": 30.0, "connect": 20.0, "load": 4.0}),
        (20.0, None, {"imports": 30.0, "connect": 0.0, "load": 4.0}),
        (50.0, "connected 21.5", {"imports": 30.0, "connect": 21.5, "load": 4.0}),
    ],
)
def test_a_wait_for_the_gate_is_a_part(opened, loading, parts):
    """The wait lies between imports and loading, so that the parts after it are not too early."""
    began = datetime(2027, 3, 1, 10, 0, 0)
    form = replace(
        WITHOUT_YEAR, seconds={"connect": re.compile(r"connected ([\d.]+)"), "load": re.compile(r"loaded ([\d.]+)")}
    )
    lines = ["INFO 03-01 10:00:30 ready", loading or "", "loaded 4.0"]
    found = start_seconds(lines, form, began.timestamp(), None if opened is None else began.timestamp() + opened)
    assert found == pytest.approx(parts)
    assert list(found) == list(parts)
