"""Whole runs: Ray against one process, third-party plugins by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from slime_plugin_kit.listening_sockets import PLUGIN, beyond_loopback

if TYPE_CHECKING:
    from conftest import Installed, TinyRun
    from slime_plugin_kit.warm_slime import WarmSlime


def succeed(tiny: TinyRun, *words: str, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", "from slime_core.cli.main import main; main()", "run", "run.toml", *words]
    env = env or {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tiny.folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def succeed_warm(warm: WarmSlime, tiny: TinyRun, *words: str) -> str:
    """Runs in a fork; starts are tested elsewhere."""
    code, out, err = warm.run(["run", "run.toml", *words], tiny.folder)
    assert code == 0, err
    return out


def rows(run_dir: Path, axis: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["axis"] == axis]


@pytest.mark.ray
def test_ray_with_two_ranks_and_a_strangers_wheel_equals_one_process(
    tiny: TinyRun, install_third_party: Callable[..., Installed]
) -> None:
    """Loss, gradient norm and weights after an SGD step on the same samples, with uneven lengths. Reward, advantage, KL
    estimator and observer are of a third-party distribution: the driver and the ranks have to find it. What else one process
    does with it is in test_third_party.py."""
    env = install_third_party("acme-slime").env(OMP_NUM_THREADS="1")
    (tiny / "listening.py").write_text(PLUGIN)
    words = (
        "--num-rollout", "1", "--optimizer", "sgd", "--lr", "0.1", "--rollout-batch-size", "6", "--n-samples-per-prompt", "4",
        "--max-tokens-per-gpu", "64", "--reward", "acme", "--algo.advantage", "acme_rank", "--rank-scale", "0.5",
        "--kl-loss-type", "acme_half", "--kl-loss-coef", "0.05", "--plugin", "listening.py", "--save-hf",
    )  # fmt: skip
    ray = ("--launcher", "ray", "--actor-num-gpus-per-node", "2", "--dump-rollouts", "--async-save")
    out = succeed(tiny, *words, *ray, "--name", "two", env=env)
    assert "ray::TrainActor" in (tiny.runs / "two/listening.txt").read_text()
    assert beyond_loopback(tiny.runs / "two/listening.txt") == []
    assert tiny.checkpoints("two") == ["step_1"]
    assert (tiny.runs / "two/acme.log").exists(), out
    manifest = json.loads((tiny.runs / "two/manifest.json").read_text())
    used = set(manifest["plugins"].values())
    assert {"slime.rewards:acme-slime/acme 1.2.3", "slime.kl:acme-slime/acme_half 1.2.3"} <= used
    assert manifest["config"]["algo"]["advantage"] == {"name": "acme_rank", "rank_scale": 0.5}
    dump = tiny.runs / "two/rollouts"
    lengths = {len(tokens) for tokens in tokens_of(dump / "step_000000.parquet")}
    assert len(lengths) > 1, "all responses have one length: the comparison would be easy"
    replay = ("--rollout.collector", "replay", "--collector.folder", str(dump))
    succeed(tiny, *words, *replay, "--name", "one", env=env)
    one, two = (rows(tiny.runs / name, "train/step")[0] for name in ("one", "two"))
    assert set(one) == set(two)
    assert "train/kl_loss" in one
    assert one["train/grad_norm"] > 0
    # The last bits of both sides' log-probs, which are others on another processor.
    rounding = "train/train_rollout_logprob_abs_diff"
    assert max(one.pop(rounding), two.pop(rounding)) < 1e-6
    for name in one:
        assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name
    start = load_file(tiny / "base/model.safetensors")
    left, right = (load_file(tiny.runs / name / "hf/model.safetensors") for name in ("one", "two"))
    for name, weights in left.items():
        np.testing.assert_allclose(right[name], weights, rtol=1e-5, atol=1e-7)
    assert any(np.abs(weights - start[name]).max() > 1e-6 for name, weights in left.items()), "nothing was trained"


def tokens_of(path: Path) -> list[list[int]]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path)["tokens"].to_pylist()


def test_a_plugin_file_is_used_by_name(tiny: TinyRun, warm: WarmSlime) -> None:
    """And nothing of the run can be reached from another machine. The latter with Ray: the test above."""
    (tiny / "mine.py").write_text(
        "from slime_core.plugin import reward\n\n\n@reward('mine')\ndef mine(sample):\n    return sample.response_length % 2\n"
        f"\n\n{PLUGIN}"
    )
    out = succeed_warm(warm, tiny, "--plugin", str(tiny / "mine.py"), "--reward", "mine", "--num-rollout", "1")
    assert rows(tiny.runs / "tiny", "rollout/step"), out
    assert beyond_loopback(tiny.runs / "tiny" / "listening.txt") == []
