"""What ships with slime keeps its own contracts."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from kit_run import install, run_kit

from slime_core.cli.scaffold import kinds, plan_new, write

SHIPPED = sorted((Path(__file__).parents[3] / "plugins").glob("*/pyproject.toml"))
WITH_A_MODEL = {"slime.backends", "slime.engines"}
ELSEWHERE = {"slime-megatron", "slime-sglang", "slime-verifiers"}
"""What starts a server for each property, or imports for seconds, is proven by the tests of its own target."""


def shipped(*, with_a_model):
    """Names of the distributions that have, or have not, a backend or an engine."""
    projects = [tomllib.loads(path.read_text())["project"] for path in SHIPPED]
    here = [project for project in projects if project["name"] not in ELSEWHERE]
    return [p["name"] for p in here if bool(WITH_A_MODEL & set(p.get("entry-points", {}))) == with_a_model]


def scaffolded(folder):
    """Names of distributions as `slime new` writes them, one of each kind, as if they were installed."""
    names = []
    for kind in kinds():
        plan = plan_new(kind, f"acme-{kind}", None)
        write(plan, folder / plan.dist)
        targets = {
            group: {name: f"{plan.package}.plugin{':' * bool(target)}{target}" for name, target in named.items()}
            for group, named in plan.entries.items()
        }
        install(folder / plan.dist / "src", plan.dist, targets)
        names.append(plan.dist)
    return names


@pytest.mark.parametrize(
    ("dists", "new"),
    [(["slime-core", *shipped(with_a_model=False)], True), (shipped(with_a_model=True), False)],
    ids=["light, and what slime new writes", "with a model"],
)
def test_it_keeps_its_contracts(tmp_path, dists, new):
    written = scaffolded(tmp_path) if new else []
    dists = [*dists, *written]
    words = [word for dist in dists for word in ("--slime-plugin", dist)]
    ran = run_kit(tmp_path, *words, path=[tmp_path / dist / "src" for dist in written])
    assert not ran.failed, "\n\n".join(f"{case}\n{text}" for case, text in ran.failed.items())
    assert ran.code == 0, ran.out
    for dist in dists:
        # Converters and hooks have the properties of every entry alone; whether all cases of a kind ran, the kit knows.
        assert any(f"[{dist}/" in case or f":{dist}/" in case for case in ran.passed), f"nothing of {dist} was run"


def test_nothing_that_ships_is_left_out():
    assert {"slime-grpo", "slime-estimators", "slime-rm-math", "slime-filters", "slime-track"} <= set(
        shipped(with_a_model=False)
    )
    assert {"slime-fsdp", "slime-local"} <= set(shipped(with_a_model=True))
