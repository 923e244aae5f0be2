"""`slime run` with SGLang on one GPU, trainer and engine taking turns: what a CPU cannot run, or gives no memory back for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
STEPS = 4
ENGINE = (
    'name = "sglang", attention_backend = "triton", sampling_backend = "pytorch", grammar_backend = "none", '
    "mem_fraction_static = 0.3, disable_cuda_graph = true"
)
RUN = """\
name = "tiny"
backend = "fsdp"
engine = { ENGINE }
reward = "gsm8k"
algo = { name = "grpo", get_mismatch_metrics = true }
launcher = { name = "local", device = "cuda", colocate = true }
model = { hf_checkpoint = "base" }
data = { prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }
rollout = { rollout_batch_size = 8, n_samples_per_prompt = 4, rollout_max_response_len = 128 }
train = { num_rollout = 4, num_steps_per_rollout = 1, lr = 1e-3 }
sync = { transport = "ipc" }
"""
VANDAL = '''
"""Kills the server while it answers in step 2."""
import os, signal, threading
import psutil
from slime_core.plugin import hook


@hook
def rollout_start(event):
    if event.rollout_id != 2:
        return
    children = psutil.Process().children(recursive=True)
    (server,) = [child.pid for child in children if child.cmdline()[1:3] == ["-m", "slime_sglang.server.launch"]]
    (event.run.run_dir / "killed").write_text(str(server))
    threading.Timer(0.3, os.kill, (server, signal.SIGKILL)).start()
'''


def run(folder: Path, engine: str, *words: str) -> Path:
    sizes = ["--hidden-size", "256", "--num-heads", "4", "--num-layers", "4", "--intermediate-size", "512"]
    slime(folder, "models", "new", "base", "--alphabet", "0123456789+= ", *sizes)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(RUN.replace("ENGINE", engine))
    slime(folder, "run", "run.toml", "--dump-rollouts", *words)
    return folder / "runs" / "tiny"


def slime(folder: Path, *words: str) -> None:
    ended = subprocess.run([*SLIME, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder: Path, axis: str) -> list[dict[str, float]]:
    return [row["metrics"] for row in lines(folder / "metrics.jsonl") if row["axis"] == axis]


def assert_engine_has_the_trainers_weights(folder: Path) -> None:
    for step in metrics(folder, "train/step"):
        assert step["train/train_rollout_logprob_abs_diff"] < 0.03


def test_drafts_of_the_model_itself_are_nearly_all_accepted(tmp_path: Path) -> None:
    """As long as the draft's weights are those of the model: pushes reach both."""
    draft = (
        f', speculative_algorithm = "STANDALONE", speculative_draft_model_path = "{tmp_path / "base"}", '
        "speculative_num_steps = 3, speculative_eagle_topk = 1, speculative_num_draft_tokens = 4"
    )
    folder = run(tmp_path, ENGINE + draft)
    assert_engine_has_the_trainers_weights(folder)
    for step in metrics(folder, "rollout/step"):
        assert step["rollout/spec_accept_length"] > 3
        assert step["rollout/spec_accept_rate"] > 0.8


def test_drafts_of_another_model_keep_its_weights(tmp_path: Path) -> None:
    other = [
        "--hidden-size",
        "128",
        "--num-heads",
        "2",
        "--num-layers",
        "1",
        "--intermediate-size",
        "128",
        "--seed",
        "7",
    ]
    slime(tmp_path, "models", "new", "other", "--alphabet", "0123456789+= ", *other)
    draft = (
        f', speculative_algorithm = "STANDALONE", speculative_draft_model_path = "{tmp_path / "other"}", '
        "speculative_num_steps = 3, speculative_eagle_topk = 1, speculative_num_draft_tokens = 4"
    )
    folder = run(tmp_path, ENGINE + draft)
    assert_engine_has_the_trainers_weights(folder)
    assert all(step["rollout/spec_verify_ct"] > 0 for step in metrics(folder, "rollout/step"))


def test_an_engine_that_shares_the_trainers_gpu_is_killed_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "vandal.py").write_text(VANDAL)
    folder = run(tmp_path, ENGINE, "--plugin", "vandal.py")
    assert_engine_has_the_trainers_weights(folder)
    events = lines(folder / "events.jsonl")
    lost, restarted, recovered = (
        next(event for event in events if event["event"] == f"engine_{what}")
        for what in ("lost", "restarted", "recovered")
    )
    assert restarted["pid"] != int((folder / "killed").read_text())
    assert lost["engine"] == restarted["engine"] == recovered["engine"]
    assert lost["redispatched"] > 0
    assert len(metrics(folder, "rollout/step")) == STEPS
