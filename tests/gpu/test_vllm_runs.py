"""`slime run` with vLLM on two GPUs, trainer and engines in turns on both, by every way of weights. Log-probs of every step are
the trainer's.

`pytest tests/gpu/test_vllm_runs.py -m gpu -s`: needs vLLM in `.venv-vllm` or in this interpreter, Ray and two GPUs. The runs of
all chosen tests start side by side, since a start takes two minutes, and share the GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

OWN = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]
LIMIT_S = 400.0
STEPS = 3
CLOSE = 0.03
"""Nats, the mean of a step: bfloat16 on either side, small weights."""
RUN = """\
name = "tiny"
seed = 1
backend = "fsdp"
reward = "random"
algo = { name = "grpo", get_mismatch_metrics = true }
model = { hf_checkpoint = "base" }
data = { prompt_data = "train.jsonl", input_key = "prompt", label_key = "label" }
rollout = { rollout_batch_size = 8, n_samples_per_prompt = 4, rollout_max_response_len = 128 }
checkpoint = { save_hf = false }
eval = { skip_eval_before_train = true }
"""
TRAIN: Mapping[str, Any] = {"num_rollout": STEPS, "num_steps_per_rollout": 1, "lr": 1e-3}
TURNS = {"name": "ray", "device": "cuda", "colocate": True, "actor_num_gpus_per_node": 2}
APART = {"name": "ray", "device": "cuda", "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
LENT = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**29, "enforce_eager": True}
"""Servers that start side by side cannot measure what is free."""
COMPARED = {"check_weight_update_equal": True}
RUNS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "tensor parallel by ipc": {
        "launcher": TURNS | {"rollout_num_gpus_per_engine": 2},
        "sync": {"transport": "ipc"} | COMPARED,
    },
    "two engines, weights dropped": {
        "launcher": TURNS | {"rollout_num_gpus_per_engine": 1},
        "engine": {"sleep_level": 2},
        "sync": {"transport": "ipc"} | COMPARED,
    },
    "float8": {
        "launcher": TURNS | {"rollout_num_gpus_per_engine": 1},
        "engine": {"quantization": "fp8"},
        "sync": {"transport": "ipc"} | COMPARED,
    },
    "adapter": {
        "launcher": TURNS | {"rollout_num_gpus_per_engine": 2},
        "backend": {"name": "fsdp", "lora_rank": 8},
        "sync": {"transport": "adapter"},
    },
    "by nccl": {"launcher": APART, "sync": {"transport": "distributed"} | COMPARED},
}
TIMES = ("rollout", "train", "update_weights", "engine_sleep", "engine_wake_up")
FAR = {"float8": 0.1}
"""Weights in eight bits move log-probs by more."""


def table(values: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"


class Run:
    """A run that has been started in a folder of its own."""

    def __init__(self, folder: Path, base: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
        self.folder, self._began = folder, time.monotonic()
        folder.mkdir()
        (folder / "base").symlink_to(base)
        rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        python = {"python": str(OWN)} if OWN.exists() else {}
        engine = {"name": "vllm"} | python | LENT | tables.get("engine", {})
        lines = {"train": TRAIN, "engine": engine, **{key: value for key, value in tables.items() if key != "engine"}}
        text = RUN.replace('backend = "fsdp"\n', "" if "backend" in tables else 'backend = "fsdp"\n')
        (folder / "run.toml").write_text(text + "".join(f"{key} = {table(value)}\n" for key, value in lines.items()))
        with (folder / "output").open("w") as output:
            self._process = subprocess.Popen(
                [*SLIME, "run", "run.toml"], cwd=folder, stdout=output, stderr=subprocess.STDOUT
            )

    def ended(self, limit_s: float) -> list[dict[str, float]]:
        """Metrics of its optimizer steps."""
        code = self._process.wait(max(limit_s - (time.monotonic() - self._began), 1))
        assert code == 0, (self.folder / "output").read_text()[-6000:]
        rows = [json.loads(line) for line in (self.folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
        for row in rows:
            if row["axis"] == "rollout/step":
                times = {name: round(row["metrics"].get(f"perf/{name}_time", 0), 2) for name in TIMES}
                print(f"  step {row['step']}: {times}", flush=True)
        return [row["metrics"] for row in rows if row["axis"] == "train/step"]

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    folder = tmp_path_factory.mktemp("runs")
    words = ["--alphabet", "0123456789+= ", "--hidden-size", "256", "--num-heads", "4", "--num-layers", "4"]
    words += ["--intermediate-size", "512"]
    subprocess.run([*SLIME, "models", "new", "base", *words], cwd=folder, check=True)
    chosen = [
        item.callspec.params["name"] for item in request.session.items if "runs" in getattr(item, "fixturenames", ())
    ]
    started = {name: Run(folder / name.replace(" ", "-"), folder / "base", RUNS[name]) for name in chosen}
    yield started
    for run in started.values():
        run.stop()


@pytest.mark.parametrize("name", RUNS)
def test_engines_have_the_trainers_weights(name: str, runs: dict[str, Run]) -> None:
    steps = runs[name].ended(LIMIT_S)
    apart = [step["train/train_rollout_logprob_abs_diff"] for step in steps]
    print(f"{name}: {apart} nats")
    assert len(steps) == STEPS
    assert all(step["train/grad_norm"] > 0 for step in steps)
    assert max(apart) < FAR.get(name, CLOSE)
