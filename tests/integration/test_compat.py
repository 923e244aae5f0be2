"""A launch script of upstream slime, translated and run: its reward, generate function and filter are its functions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_plugin_kit.warm_slime import WarmSlime

LAUNCH = Path(__file__).parents[2] / "plugins" / "slime-compat" / "tests" / "launch"
TRANSLATE = [sys.executable, "-c", "from slime_core.cli.main import main; main()", "compat"]


@pytest.mark.runs
def test_a_translated_script_is_run_with_its_own_functions(
    make_tiny: Callable, warm: WarmSlime, tmp_path: Path
) -> None:
    tiny = make_tiny(tmp_path / "there")
    tiny.warm = warm
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


HOOKS = {
    "advantage": "--custom-advantage-function-path old_hooks.advantage --kl-coef 0.1 --rollout-function-path old_hooks.rollout",
    "rewards": "--custom-reward-post-process-path old_hooks.center --rollout-sample-filter-path old_hooks.keep_first "
    "--rollout-sample-hook-path old_hooks.hook --use-tis --custom-tis-function-path old_hooks.tis "
    "--custom-pg-loss-reducer-function-path old_hooks.reducer --buffer-filter-path old_hooks.oldest",
}


@pytest.mark.runs
@pytest.mark.parametrize("hooks", HOOKS)
def test_a_translated_line_runs_the_hooks_that_it_names(
    make_tiny: Callable, warm: WarmSlime, tmp_path: Path, hooks: str
) -> None:
    tiny = make_tiny(tmp_path / "there")
    tiny.warm = warm
    shutil.copytree(LAUNCH, tiny.folder, dirs_exist_ok=True)
    line = (
        "python3 tasks/train.py --hf-checkpoint base --save runs/hooks --custom-rm-path old_hooks.reward --num-rollout 2 "
        "--rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 4 --global-batch-size 4 --lr 1e-3 "
        "--actor-num-nodes 1 --actor-num-gpus-per-node 1 --save-interval 1 --data-source-path old_hooks.Numbers "
    )
    translated = tiny.slime("compat", "--backend", "fsdp", "--engine", "local", "--", *(line + HOOKS[hooks]).split())
    assert translated.code == 0, translated.err
    (tiny / "run.toml").write_text(translated.out)
    ended = tiny.run()
    assert ended.code == 0, ended.err
    steps = [r["metrics"] for r in tiny.metrics("hooks") if r["axis"] == "train/step"]
    rollouts = [r["metrics"] for r in tiny.metrics("hooks") if r["axis"] == "rollout/step"]
    assert len(steps) == len(rollouts) == 2
    if hooks == "advantage":
        # Set by the function: 0.25 at every token, whatever the rewards are.
        assert [metrics["rollout/advantages"] for metrics in rollouts] == [0.25] * 2
        assert [metrics["rollout/chosen"] for metrics in rollouts] == [2] * 2
    else:
        # The second sample of each group is not trained; centered rewards have mean 0.
        assert all(abs(metrics["rollout/raw_reward"]) < 1e-6 for metrics in rollouts)
        assert all(metrics["train/tis_ratio"] > 0 for metrics in steps)
