"""Whole runs: a short form of the demo, Ray against one process, third-party plugins by name."""

from __future__ import annotations

import json
import os
import shutil
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

ROOT = Path(__file__).parents[2]


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


def test_the_demo_in_short_form_learns(tmp_path: Path) -> None:
    example = shutil.copytree(
        ROOT / "examples/arithmetic", tmp_path / "arithmetic", ignore=shutil.ignore_patterns("generated")
    )
    shutil.copy(ROOT / "examples/warm_start.py", tmp_path)
    words = [
        "run",
        str(example / "run.toml"),
        "--num-rollout",
        "8",
        "--runs-dir",
        str(tmp_path / "runs"),
        "--lr-warmup-iters",
        "4",
    ]
    command = [sys.executable, "-c", "from slime_core.cli.main import main; main()", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "runs/arithmetic/summary.json").read_text())
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    assert before["greedy"] < 0.5
    assert before["sampled"] < 0.5
    assert after["greedy"] > before["greedy"] + 0.15, summary
    assert after["sampled"] > before["sampled"] + 0.15, summary
    assert_generates_in_plain_transformers(tmp_path / "runs/arithmetic/hf")
    assert_held_out_is_disjoint(example / "generated")


def assert_generates_in_plain_transformers(folder: Path) -> None:
    code = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model, tokenizer = (auto.from_pretrained(sys.argv[1]) for auto in (AutoModelForCausalLM, AutoTokenizer))\n"
        "asked = tokenizer('312+457=', return_tensors='pt')\n"
        "print(tokenizer.decode(model.generate(**asked, max_new_tokens=13, do_sample=False)[0]))\n"
        "assert not [name for name in sys.modules if name.startswith('slime')]\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("312+457="), ended.stdout
    assert "\\boxed{" in ended.stdout


def assert_held_out_is_disjoint(folder: Path) -> None:
    def pairs(name: str) -> set[frozenset[str]]:
        lines = (folder / name).read_text().splitlines()
        return {frozenset(json.loads(line)["prompt"].rstrip("=").split("+")) for line in lines}

    train, held_out = pairs("train.jsonl"), pairs("test.jsonl")
    assert held_out
    assert not train & held_out


@pytest.mark.ray
def test_ray_with_two_ranks_equals_one_process(tiny: TinyRun, warm: WarmSlime) -> None:
    """On one replayed dump: loss, gradient norm and weights after an SGD step, with uneven lengths."""
    succeed_warm(
        warm,
        tiny,
        "--num-rollout",
        "1",
        "--rollout-batch-size",
        "6",
        "--n-samples-per-prompt",
        "4",
        "--dump-rollouts",
        "--fresh",
    )
    dump = tiny.runs / "tiny/rollouts"
    lengths = {len(tokens) for tokens in tokens_of(dump / "step_000000.parquet")}
    assert len(lengths) > 1, "all responses have one length: the comparison would be easy"
    replay = (
        "--rollout.collector", "replay", "--collector.folder", str(dump), "--num-rollout", "1", "--optimizer", "sgd",
        "--lr", "0.1", "--rollout-batch-size", "6", "--n-samples-per-prompt", "4", "--max-tokens-per-gpu", "64",
        "--algo.advantage", "group_norm", "--kl-loss-coef", "0.05", "--save-hf",
    )  # fmt: skip
    succeed_warm(warm, tiny, *replay, "--name", "one")
    (tiny / "listening.py").write_text(PLUGIN)
    ray = ("--launcher", "ray", "--actor-num-gpus-per-node", "2", "--plugin", "listening.py")
    succeed(tiny, *replay, "--name", "two", *ray, "--async-save")
    assert "ray::TrainActor" in (tiny.runs / "two/listening.txt").read_text()
    assert beyond_loopback(tiny.runs / "two/listening.txt") == []
    assert tiny.checkpoints("two") == ["step_1"]
    one, two = (rows(tiny.runs / name, "train/step")[0] for name in ("one", "two"))
    assert set(one) == set(two)
    assert one["train/grad_norm"] > 0
    # The last bits of both sides' log-probs, which are others on another processor.
    rounding = "train/train_rollout_logprob_abs_diff"
    assert max(one.pop(rounding), two.pop(rounding)) < 1e-6
    for name in one:
        assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-8), name
    start = load_file(tiny / "base/model.safetensors")
    left, right = (load_file(tiny.runs / name / "hf/model.safetensors") for name in ("one", "two"))
    for name, weights in left.items():
        np.testing.assert_allclose(right[name], weights, rtol=1e-5, atol=1e-7)
    assert any(np.abs(weights - start[name]).max() > 1e-6 for name, weights in left.items()), "nothing was trained"


def tokens_of(path: Path) -> list[list[int]]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path)["tokens"].to_pylist()


@pytest.mark.ray
def test_a_strangers_wheel_is_used_by_name(tiny: TinyRun, install_third_party: Callable[..., Installed]) -> None:
    """Reward, advantage, KL estimator and observer of a third-party distribution, under Ray: the driver and the ranks have to
    find it. What one process does with it is in test_third_party.py."""
    installed = install_third_party("acme-slime")
    words = ("--reward", "acme", "--algo.advantage", "acme_rank", "--rank-scale", "0.5", "--kl-loss-type", "acme_half")
    out = succeed(
        tiny, *words, "--kl-loss-coef", "0.1", "--num-rollout", "2", "--name", "there", "--launcher", "ray",
        env=installed.env(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert (tiny.runs / "there" / "acme.log").exists(), out
    manifest = json.loads((tiny.runs / "there" / "manifest.json").read_text())
    assert {"slime.rewards:acme-slime/acme 1.2.3", "slime.kl:acme-slime/acme_half 1.2.3"} <= set(
        manifest["plugins"].values()
    )
    assert manifest["config"]["algo"]["advantage"] == {"name": "acme_rank", "rank_scale": 0.5}
    assert "train/kl_loss" in rows(tiny.runs / "there", "train/step")[0]


def test_a_plugin_file_is_used_by_name(tiny: TinyRun, warm: WarmSlime) -> None:
    """And nothing of the run can be reached from another machine. Both with Ray: test_ray_with_two_ranks_equals_one_process."""
    (tiny / "mine.py").write_text(
        "from slime_core.plugin import reward\n\n\n@reward('mine')\ndef mine(sample):\n    return sample.response_length % 2\n"
        f"\n\n{PLUGIN}"
    )
    out = succeed_warm(warm, tiny, "--plugin", str(tiny / "mine.py"), "--reward", "mine", "--num-rollout", "1")
    assert rows(tiny.runs / "tiny", "rollout/step"), out
    assert beyond_loopback(tiny.runs / "tiny" / "listening.txt") == []
