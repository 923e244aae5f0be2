"""An actor and a critic that share one GPU: one sleeps while the other works, which changes nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
RUN = """\
name = "tiny"
backend = { name = "fsdp", precision = "PRECISION" }
engine = { name = "local", dtype = "PRECISION" }
reward = "gsm8k"
algo = { name = "ppo", kl_coef = 0.01, num_critic_only_steps = 1 }
model = { hf_checkpoint = "base" }
data = { prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }
rollout = { rollout_batch_size = 8, n_samples_per_prompt = 4, rollout_max_response_len = 8 }
train = { num_rollout = 3, num_steps_per_rollout = 2, lr = 1e-3 }
launcher = { device = "cuda" }
checkpoint = { save_interval = 1 }
"""


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_taking_turns_changes_nothing(tmp_path: Path, precision: str) -> None:
    sizes = ["--hidden-size", "64", "--num-layers", "2", "--intermediate-size", "128", "--max-length", "64"]
    slime(tmp_path, "models", "new", "base", "--alphabet", "0123456789+= ", *sizes)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(RUN.replace("PRECISION", precision))
    slime(tmp_path, "run", "run.toml", "--name", "turns", "--offload-train")
    slime(tmp_path, "run", "run.toml", "--name", "both", "--no-offload-train")
    turns, both = (metrics(tmp_path / "runs" / name) for name in ("turns", "both"))
    assert len(turns) == len(both) == 6
    assert turns[-1]["train/grad_norm"] > 0
    assert turns[-1]["train/critic-grad_norm"] > 0
    for one, other in zip(turns, both, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


def slime(folder: Path, *words: str) -> None:
    ended = subprocess.run([*SLIME, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def metrics(run: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["metrics"] for record in records if record["axis"] == "train/step"]
