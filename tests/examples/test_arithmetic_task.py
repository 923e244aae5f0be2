"""Short runs of the examples with the arithmetic task: checks the results in their READMEs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunExample

SHORT = ("--num-rollout", "6", "--lr-warmup-iters", "4", "--rollout-batch-size", "192")


def test_distill(run_example: RunExample) -> None:
    """First: its warm start makes the teacher too, and the same base model and data, which the others find then."""
    ran = run_example("distill", "--num-rollout", "10", "--lr-warmup-iters", "8")
    assert ran.after["greedy"] > ran.before["greedy"] + 0.1


def test_arithmetic(run_example: RunExample, examples: Path) -> None:
    """The demo."""
    ran = run_example("arithmetic", "--num-rollout", "8", "--lr-warmup-iters", "4")
    for name in ("greedy", "sampled"):
        assert ran.before[name] < 0.5
        assert ran.after[name] > ran.before[name] + 0.15
    assert_generates_in_plain_transformers(ran.folder / "hf")
    assert_held_out_is_disjoint(examples / "arithmetic/generated")


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


def test_fully_async(run_example: RunExample) -> None:
    ran = run_example("fully_async", *SHORT)
    assert ran.after["greedy"] > ran.before["greedy"] + 0.1
    staleness = [step["rollout/staleness/max"] for step in ran.metrics("rollout/step")]
    assert 2 <= max(staleness) <= 4


def test_partial_rollout(run_example: RunExample) -> None:
    ran = run_example("partial_rollout", *SHORT, "--over-sampling-batch-size", "288")
    assert ran.after["greedy"] > ran.before["greedy"] + 0.1
    steps = ran.metrics("rollout/step")
    assert max(step["rollout/staleness/max"] for step in steps) in (1, 2)


def test_eval_multi_task(run_example: RunExample) -> None:
    ran = run_example("eval_multi_task", *SHORT)
    assert set(ran.after) == {"greedy", "eight", "short", "carries", "last_number"}
    last = ran.metrics("eval/step")[-1]
    passed = [last[f"eval/eight-pass@{k}"] for k in (1, 2, 4, 8)]
    assert passed == sorted(passed)
    assert passed[-1] > passed[0] + 0.1
    assert ran.after["greedy"] > ran.before["greedy"] + 0.1
    assert ran.after["short"] < 0.05
    assert ran.after["carries"] < 0.1


def test_reproducibility(examples: Path) -> None:
    """Of smaller steps: both runs are of the file."""
    written = examples / "reproducibility" / "run.toml"
    text = written.read_text()
    assert "rollout_batch_size = 384\n" in text
    written.write_text(text.replace("rollout_batch_size = 384\n", "rollout_batch_size = 48\n"))
    compare = [sys.executable, str(examples / "reproducibility" / "compare.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*compare, "--num-rollout", "6"], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "metrics but times              the same" in ended.stdout


def test_sft(run_example: RunExample) -> None:
    ran = run_example("sft", "--eval-interval", "92")
    assert ran.before["sampled"] == 0.0
    assert ran.after["sampled"] > 0.1


def test_true_on_policy(run_example: RunExample) -> None:
    ran = run_example("true_on_policy", *SHORT)
    assert ran.after["greedy"] > ran.before["greedy"] + 0.1
    steps = ran.metrics("train/step")
    assert len(steps) == 24
    assert {step["train/train_rollout_logprob_abs_diff"] for step in steps} == {0.0}
    assert {step["train/mis_ratio_max"] for step in steps} == {1.0}
    off = run_example("true_on_policy", "--rollout-batch-size", "32", "--num-rollout", "1", "--no-true-on-policy-mode")
    assert all(0 < step["train/train_rollout_logprob_abs_diff"] < 1e-5 for step in off.metrics("train/step"))


def test_the_notebook(examples: Path, tmp_path: Path) -> None:
    """All its cells, as `marimo export` runs them: the loop learns, and the page has the curve and samples."""
    page, runs = tmp_path / "page.html", tmp_path / "runs"
    notebook = examples / "notebook" / "own_loop.py"
    words = [sys.executable, "-m", "marimo", "-q", "export", "html", str(notebook), "-o", str(page), "--"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*words, "--num-steps", "16", "--runs-dir", str(runs)],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [json.loads(line) for line in (runs / "notebook/metrics.jsonl").read_text().splitlines()]
    rewards = [line["metrics"]["rollout/raw_reward"] for line in lines if line["axis"] == "rollout/step"]
    assert len(rewards) == 16
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.2
    text = page.read_text()
    assert "123+456=" in text
    assert "image/png" in text
    assert (runs / "notebook/checkpoints/step_16/COMPLETE").exists()
    assert (runs / "notebook/hf/config.json").exists()
