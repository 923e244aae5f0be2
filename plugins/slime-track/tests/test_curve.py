from __future__ import annotations

import pytest

from slime_track import curve
from slime_track.curve import Curve


def test_a_long_run_has_as_many_points_as_a_picture_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each the mean of equally many measurements."""
    monkeypatch.setattr(curve, "MOST", 8)
    found = Curve()
    for step in range(50):
        found.add(step, 2.0 * step)
        assert len(found) <= 8
    steps, values = found.points
    # Eight at a time, and the last two.
    assert steps == [3.5, 11.5, 19.5, 27.5, 35.5, 43.5, 48.5]
    assert values == [2 * step for step in steps]


def test_a_short_run_has_a_point_for_each_measurement() -> None:
    found = Curve()
    assert not found
    for step in (0, 10, 20):
        found.add(step, step / 3)
    assert found
    assert found.points == ([0, 10, 20], [0, 10 / 3, 20 / 3])
