"""The demo's task is learned on responses of vLLM: the first steps. benchmarks/RESULTS.md has longer runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

WARM_START = Path(__file__).parents[3] / "examples" / "warm_start.py"
RUN = """
name = "addition"
backend = "fsdp"
reward = "math"
algo = { name = "grpo", eps_clip_high = 0.28, get_mismatch_metrics = true }
model = { hf_checkpoint = "made/base" }
data = { prompt_data = "made/train.jsonl", input_key = "prompt", label_key = "label", rollout_shuffle = true }
rollout = { rollout_batch_size = 128, n_samples_per_prompt = 8, rollout_max_response_len = 18, concurrency = 1024 }
checkpoint = { save_hf = false }

[train]
num_rollout = 6
num_steps_per_rollout = 4
lr = 1e-3
lr_decay_style = "constant"
lr_warmup_iters = 4
adam_beta2 = 0.95
max_tokens_per_gpu = 32768

[eval]
eval_interval = 6
datasets.greedy = { path = "made/test.jsonl@[0:200]", temperature = 0.0 }
"""


def call(folder, *command):
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_demo_begins_to_learn(served, tmp_path):
    task = Path(__file__).with_name("addition.py")
    call(tmp_path, sys.executable, str(WARM_START), str(task), "--folder", str(tmp_path / "made"))
    (tmp_path / "run.toml").write_text(RUN)
    words = ["--engine", "vllm", "--vllm-external-engine-addrs", served.address]
    words += ["--vllm-external-engine-token-file", str(served.token_file)]
    call(tmp_path, str(Path(sys.executable).with_name("slime")), "run", "run.toml", *words)
    logged = [json.loads(line) for line in (tmp_path / "runs/addition/metrics.jsonl").read_text().splitlines()]
    before, after = [line["metrics"]["eval/greedy"] for line in logged if "eval/greedy" in line["metrics"]]
    assert after >= before + 0.1, f"greedy accuracy went from {before} to {after}"
    steps = [line["metrics"] for line in logged if line["axis"] == "train/step"]
    apart = [step["train/train_rollout_logprob_abs_diff"] for step in steps]
    assert max(apart) < 1e-5
