"""vLLM and SGLang in one run: distillation with the policy on one and the teacher on the other, which resumes the other way
round."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_core.data.table import read_groups
from slime_plugin_kit.tiny_model import load_plain, log_probs_of, moved

pytestmark = pytest.mark.vllm

RUN = """
name = "mixed"
backend = "fsdp"
reward = "math"
algo = {{ name = "opd", get_mismatch_metrics = true }}
model = {{ hf_checkpoint = "{student}" }}
data = {{ prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }}
rollout = {{ rollout_batch_size = 4, n_samples_per_prompt = 2, rollout_max_response_len = 8, dump_rollouts = true }}
train = {{ lr = 1e-2, num_rollout = 2 }}
checkpoint = {{ save_hf = false }}
engine = {policy}
engines.teacher = {{ load = "{teacher}", engine = {scorer} }}
"""
SGLANG = '{ name = "sglang" }'


@pytest.fixture
def student(model, tmp_path):
    """A model that differs from the teacher, which is `model`."""
    folder = tmp_path / "student"
    for name in model.iterdir():
        (folder / name.name).parent.mkdir(exist_ok=True)
        (folder / name.name).write_bytes(name.read_bytes())
    moved(load_plain(model, torch.float32), seed=2).save_pretrained(folder)
    return folder


def run(folder, *words):
    command = [str(Path(sys.executable).with_name("slime")), "run", "run.toml", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_distillation_from_one_engine_to_the_other_and_back(served, model, student, tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shared = (
        f'{{ name = "vllm", external_engine_addrs = ["{served.address}"], '
        f'external_engine_token_file = "{served.token_file}" }}'
    )
    written = tmp_path / "run.toml"

    served.renew()
    written.write_text(RUN.format(student=student, teacher=model, policy=SGLANG, scorer=shared))
    run(tmp_path)
    written.write_text(RUN.format(student=student, teacher=model, policy=shared, scorer=SGLANG))
    run(tmp_path, "--resume", "runs/mixed", "--num-rollout", "4")

    folder = tmp_path / "runs/mixed"
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in logged if line["axis"] == "train/step"]
    assert len(steps) == 4
    # Each engine had the trainer's weights, the resumed one those of the checkpoint.
    assert max(step["train/train_rollout_logprob_abs_diff"] for step in steps) < 1e-5
    assert min(step["train/grad_norm"] for step in steps) > 0
    taught = load_plain(model)
    rollouts = [line["metrics"] for line in logged if line["axis"] == "rollout/step"]
    for step, metrics in enumerate(rollouts):
        gaps = []
        for group in read_groups(folder / f"rollouts/step_{step:06d}.parquet"):
            for sample in group.samples:
                tokens, length = [int(token) for token in sample.tokens], sample.response_length
                with torch.no_grad():
                    exact, _ = log_probs_of(taught, tokens[:-length], tokens[-length:])
                gaps.append(sample.rollout_log_probs - exact.numpy())
        assert metrics["rollout/opd_reverse_kl"] == pytest.approx(np.concatenate(gaps).mean(), abs=1e-5)
    assert served.ask("/weight_info")[1] == {"weight_version": "4"}
