"""What ships with slime keeps its own contracts."""

from __future__ import annotations

import pytest
from kit_run import run_kit

LIGHT = ("slime-core", "slime-grpo", "slime-estimators", "slime-rm-math", "slime-filters", "slime-track")
WITH_A_MODEL = ("slime-fsdp", "slime-local")


@pytest.mark.parametrize("dists", [LIGHT, WITH_A_MODEL], ids=["light", "with a model"])
def test_it_keeps_its_contracts(tmp_path, dists):
    words = [word for dist in dists for word in ("--slime-plugin", dist)]
    ran = run_kit(tmp_path, *words)
    assert not ran.failed, "\n\n".join(f"{case}\n{text}" for case, text in ran.failed.items())
    assert ran.code == 0, ran.out
    for dist in dists:
        assert any(f"[{dist}/" in case for case in ran.passed), f"nothing of {dist} was run"
