"""`slime run --engine vllm` with the real vLLM: two steps, by the flags that a user types."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

RUN = """
name = "carried"
backend = "fsdp"
reward = "math"
algo = {{ name = "grpo", get_mismatch_metrics = true }}
model = {{ hf_checkpoint = "{model}" }}
data = {{ prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }}
rollout = {{ rollout_batch_size = 4, n_samples_per_prompt = 2, rollout_max_response_len = 6, dump_rollouts = true }}
train = {{ num_rollout = 3, global_batch_size = 8, lr = 1e-2 }}
checkpoint = {{ save_hf = false }}
"""


def write_run(folder, model):
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(2) for b in range(4)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "run.toml").write_text(RUN.format(model=model))


def test_a_run_trains_on_responses_of_vllm(served, model, tmp_path):
    write_run(tmp_path, model)
    words = ["--engine", "vllm", "--vllm-external-engine-addrs", served.address]
    words += ["--vllm-external-engine-token-file", str(served.token_file)]
    command = [str(Path(sys.executable).with_name("slime")), "run", "run.toml", *words]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logged = [json.loads(line) for line in (tmp_path / "runs/carried/metrics.jsonl").read_text().splitlines()]
    rollouts = [line["metrics"] for line in logged if line["axis"] == "rollout/step"]
    assert [row["rollout/staleness/max"] for row in rollouts] == [0, 0, 0]
    steps = [line["metrics"] for line in logged if line["axis"] == "train/step"]
    assert len(steps) == 3
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-5 for step in steps)
    assert served.ask("/weight_info")[1] == {"weight_version": "3"}
