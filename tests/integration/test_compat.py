"""A launch script of upstream slime, translated and run: its reward, generate function and filter are its functions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "plugins" / "slime-compat" / "tests" / "launch"
TRANSLATE = [sys.executable, "-c", "from slime_core.cli.main import main; main()", "compat"]


@pytest.mark.runs
def test_a_translated_script_is_run_with_its_own_functions(make_tiny: Callable, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "there")
    shutil.copytree(LAUNCH, tiny.folder, dirs_exist_ok=True)
    translated = subprocess.run(
        [*TRANSLATE, "--backend", "fsdp", "--engine", "local", "run-tiny.sh"],
        cwd=tiny.folder,
        env={**os.environ, "BASE_DIR": str(tiny.folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    (tiny / "run.toml").write_text(translated.stdout)
    planned = tiny.run("--dry-run")
    assert planned.code == 0, planned.err
    assert "slime-compat" in planned.out
    ended = tiny.run()
    assert ended.code == 0, ended.err
    assert tiny.steps(run="tiny-grpo") == [0, 1]
    rewards = [r["metrics"]["rollout/raw_reward"] for r in tiny.metrics("tiny-grpo") if r["axis"] == "rollout/step"]
    # Means over four responses of distinct characters by four.
    assert all(reward > 0 and (reward * 16).is_integer() for reward in rewards), rewards
