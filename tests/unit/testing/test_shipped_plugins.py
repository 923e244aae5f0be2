"""What ships with slime keeps its own contracts."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from kit_run import run_kit

SHIPPED = sorted((Path(__file__).parents[3] / "plugins").glob("*/pyproject.toml"))
WITH_A_MODEL = {"slime.backends", "slime.engines"}
ELSEWHERE = {"slime-megatron", "slime-sglang"}
"""An engine that starts a server for each property is proven on one server, by the tests of its own target."""


def shipped(*, with_a_model):
    """Names of the distributions that have, or have not, a backend or an engine."""
    projects = [tomllib.loads(path.read_text())["project"] for path in SHIPPED]
    here = [project for project in projects if project["name"] not in ELSEWHERE]
    return [p["name"] for p in here if bool(WITH_A_MODEL & set(p.get("entry-points", {}))) == with_a_model]


@pytest.mark.parametrize(
    "dists", [["slime-core", *shipped(with_a_model=False)], shipped(with_a_model=True)], ids=["light", "with a model"]
)
def test_it_keeps_its_contracts(tmp_path, dists):
    words = [word for dist in dists for word in ("--slime-plugin", dist)]
    ran = run_kit(tmp_path, *words)
    assert not ran.failed, "\n\n".join(f"{case}\n{text}" for case, text in ran.failed.items())
    assert ran.code == 0, ran.out
    for dist in dists:
        assert any(f"[{dist}/" in case for case in ran.passed), f"nothing of {dist} was run"


def test_nothing_that_ships_is_left_out():
    assert {"slime-grpo", "slime-estimators", "slime-rm-math", "slime-filters", "slime-track"} <= set(
        shipped(with_a_model=False)
    )
    assert {"slime-fsdp", "slime-local"} <= set(shipped(with_a_model=True))
