"""A run of three steps on responses of vLLM, and what it leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def slime(folder, *words):
    """`slime run` as a user types it; its folder."""
    command = [str(Path(sys.executable).with_name("slime")), "run", "run.toml", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs/carried"


def metrics_of(run, axis):
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in logged if line["axis"] == axis]


def events_of(run, name):
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == name]
