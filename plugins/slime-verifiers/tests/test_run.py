"""A whole run on an environment, and the contract kit with the real library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.data.table import read_groups
from slime_models.new_model import ModelSizes, new_model

pytestmark = pytest.mark.runs

RUN = """\
name = "sums"
backend = "fsdp"
engine = "local"
algo = "grpo"
[model]
hf_checkpoint = "base"
[data]
source = "verifiers"
taskset = { id = "slime_sums", most = 3 }
folder = "environments"
label_key = "label"
apply_chat_template = true
[generate]
name = "verifiers"
folder = "environments"
env.taskset.id = "slime_sums"
[rollout]
rollout_batch_size = 2
n_samples_per_prompt = 2
rollout_max_response_len = 4
dump_rollouts = true
[train]
num_rollout = 2
[checkpoint]
save_hf = false
"""


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_run_trains_on_its_tasks(tmp_path):
    (tmp_path / "environments").symlink_to(Path(__file__).parent / "environments")
    sizes = ModelSizes(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_length=64)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    alphabet = "0123456789+= Ad.\n"
    new_model(tmp_path / "base", "qwen3", sizes, alphabet=alphabet, chat_template=template, initializer_range=0.3)
    (tmp_path / "run.toml").write_text(RUN)
    slime = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
    ran = subprocess.run(
        [*slime, "run", "run.toml"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr
    folder = tmp_path / "runs" / "sums"
    samples = [
        sample
        for path in sorted((folder / "rollouts").glob("*.parquet"))
        for group in read_groups(path)
        for sample in group.samples
    ]
    assert len(samples) == 8
    for sample in samples:
        number = int(sample.prompt.label) // 2
        assert sample.prompt.text == f"Add.{number}+{number}="
        given = sample.response.strip()
        expected = 0.75 * (given == sample.prompt.label) + 0.5 * (len(given) < 4)
        assert sample.reward == expected, sample.response
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in logged if line["axis"] == "rollout/step"]
    assert len(steps) == 2
    for name in ("right", "short", "letters"):
        means = [sample.reward_parts[name] for sample in samples]
        assert sum(step[f"rollout/reward_part/{name}"] for step in steps) / 2 == pytest.approx(sum(means) / 8)


def test_it_keeps_its_contracts(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--slime-plugin", "slime-verifiers"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
