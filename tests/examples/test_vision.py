"""The example with pictures: what the model earns by seeing, and nothing with another picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunExample


def test_vision(run_example: RunExample) -> None:
    ran = run_example("vision", "--num-rollout", "20")
    assert ran.after["seen"] > ran.before["seen"] + 0.08
    assert ran.before["swapped"] < 0.2
    assert ran.after["swapped"] < 0.2
