"""What ships with slime keeps its own contracts."""

from __future__ import annotations

from kit_run import install, run_kit, shipped

from slime_plugin_kit.scaffold import kinds, plan_new, write


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


def test_what_has_no_model_and_what_slime_new_writes_keep_their_contracts(tmp_path):
    """Those with a model are run beside faulty ones, in test_planted_faults."""
    written = scaffolded(tmp_path)
    dists = ["slime-rl", *shipped(with_a_model=False), *written]
    words = [word for dist in dists for word in ("--slime-plugin", dist)]
    ran = run_kit(tmp_path, *words, path=[tmp_path / dist / "src" for dist in written])
    assert not ran.failed, "\n\n".join(f"{case}\n{text}" for case, text in ran.failed.items())
    assert ran.code == 0, ran.out
    for dist in dists:
        # Converters and hooks have the properties of every entry alone; whether all cases of a kind ran, the kit knows.
        assert any(f"[{dist}/" in case or f":{dist}/" in case for case in ran.passed), f"nothing of {dist} was run"
        assert ran.is_sound(dist), f"{dist}\n{ran.out}"


def test_nothing_that_ships_is_left_out():
    assert {"slime-grpo", "slime-estimators", "slime-rm-math", "slime-filters", "slime-track"} <= set(
        shipped(with_a_model=False)
    )
    assert {"slime-fsdp", "slime-local"} <= set(shipped(with_a_model=True))
