"""The search example: the model learns to look things up, and without the search it knows nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunExample


def test_search_r1(run_example: RunExample) -> None:
    ran = run_example("search_r1", "--num-rollout", "4", "--lr-warmup-iters", "4")
    assert ran.after["search"] > ran.before["search"] + 0.3
    assert ran.after["no_tool"] < 0.05
    first, *_, last = ran.metrics("rollout/step")
    assert last["rollout/count/searches"] > first["rollout/count/searches"]
