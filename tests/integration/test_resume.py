"""A run that is killed with SIGKILL, again and again, ends with the same bits as one that is not.

The instants are uniform over wall time. An observer writes down what the run is doing, which is the witness that every
phase was hit; phases too short to be hit by chance are then waited for.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

STEPS = 48
UNIFORM_KILLS = 20
KILLS_BESIDE_WRITES = 6
PHASES = ("start", "rollout", "train", "save", "publish", "eval")
SEED = 20261121

OBSERVER = '''
from pathlib import Path
from slime_core.plugin import hook, reward


@reward("has_digit")
def has_digit(sample):
    """1 if the label's digit is anywhere in the answer."""
    return float(sample.prompt.label in sample.response)


def tell(event, phase):
    (event.run.run_dir / "phase").write_text(phase)


@hook
def run_start(event):
    tell(event, "publish")


@hook
def publish_end(event):
    tell(event, "eval")


@hook
def rollout_start(event):
    tell(event, "rollout")


@hook
def rollout_end(event):
    tell(event, "train")


@hook
def step_trained(event):
    tell(event, "save")


@hook
def publish_start(event):
    tell(event, "publish")
'''

RUN = f"""
name = "killed"
seed = 3
plugin = ["observer.py"]
backend = "fsdp"
engine = "local"
reward = "has_digit"
algo = {{ name = "grpo", kl_loss_coef = 0.01 }}
model = {{ hf_checkpoint = "base" }}
data = {{ prompt_data = "train.jsonl", input_key = "prompt", label_key = "label", rollout_shuffle = true }}
checkpoint = {{ save_interval = 4 }}
train = {{ num_rollout = {STEPS}, num_steps_per_rollout = 2, lr = 1e-3 }}
eval = {{ eval_interval = 4, datasets = {{ held_out = {{ path = "train.jsonl@[0:64]", n_samples_per_eval_prompt = 2 }} }} }}
[rollout]
rollout_batch_size = 8
n_samples_per_prompt = 4
rollout_max_response_len = 24
filters = ["nonzero_std"]
over_sampling_batch_size = 10
max_filtered_groups = 1000
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    sizes = ["--hidden-size", "32", "--num-layers", "1", "--num-heads", "2", "--intermediate-size", "64"]
    slime(folder, "models", "new", "base", "--alphabet", "0123456789+=", *sizes)
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(200)]
    rows = [{"prompt": f"{a}+{b}=", "label": str((a + b) % 10)} for a, b in pairs]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "observer.py").write_text(OBSERVER)
    (folder / "run.toml").write_text(RUN)
    return folder


def slime(folder: Path, *words: str) -> str:
    ended = subprocess.run(command(*words), cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from slime_core.cli.main import main; main()", *words]


def start(folder: Path, runs: str, *more: str) -> subprocess.Popen[bytes]:
    words = command("run", "run.toml", "--runs-dir", runs, "--quiet", *more)
    log = (folder / f"{runs}.log").open("ab")
    return subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def kill(process: subprocess.Popen[bytes], run_dir: Path) -> str:
    """Kills it and says in which phase; its reward workers end by themselves."""
    phase_file = run_dir / "phase"
    phase = phase_file.read_text() if phase_file.exists() else "start"
    process.send_signal(signal.SIGKILL)
    process.wait()
    phase_file.unlink(missing_ok=True)
    return phase or "start"


def record(run_dir: Path) -> list[dict[str, object]]:
    """What was logged, without times and attempts."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("attempt")
        line["metrics"] = {name: value for name, value in line["metrics"].items() if not name.startswith("perf/")}
    return lines


def same(left: Path, right: Path) -> None:
    assert record(left) == record(right)
    assert (left / "hf/model.safetensors").read_bytes() == (right / "hf/model.safetensors").read_bytes()


def test_killed_equals_not_killed(folder: Path) -> None:
    began = time.monotonic()
    reference = start(folder, "reference")
    assert reference.wait(timeout=120) == 0, (folder / "reference.log").read_text()
    duration = time.monotonic() - began
    assert len({line["rollout_id"] for line in record(folder / "reference/killed")}) == STEPS + 1
    slime(folder, "run", "run.toml", "--runs-dir", "again", "--quiet")
    same(folder / "again/killed", folder / "reference/killed")

    draw, hit, victims = random.Random(SEED), Counter[str](), 0
    while hit.total() < UNIFORM_KILLS:
        run_dir = folder / f"victim{victims}/killed"
        process = start(folder, f"victim{victims}")
        try:
            assert process.wait(timeout=draw.uniform(0, duration)) == 0, (folder / f"victim{victims}.log").read_text()
        except subprocess.TimeoutExpired:
            hit[kill(process, run_dir)] += 1
        else:
            same(run_dir, folder / "reference/killed")
            victims += 1
    print(f"\n{hit.total()} kills at instants uniform over {duration:.1f} s, by phase: {dict(hit)}")

    waited = [phase for phase in PHASES if not hit[phase]]
    for phase in waited:
        while not hit[phase]:
            run_dir = folder / f"victim{victims}/killed"
            process = start(folder, f"victim{victims}")
            while process.poll() is None:
                if (run_dir / "phase").exists() and (run_dir / "phase").read_text() == phase:
                    hit[kill(process, run_dir)] += 1
            if process.returncode == 0:
                same(run_dir, folder / "reference/killed")
                victims += 1
    print(f"phases that were waited for: {waited or 'none'}; all kills: {dict(hit)}")

    process = start(folder, f"victim{victims}")
    assert process.wait(timeout=120) == 0, (folder / f"victim{victims}.log").read_text()
    same(folder / f"victim{victims}/killed", folder / "reference/killed")
    attempts = json.loads((folder / f"victim{victims}/killed/attempts").read_text())
    print(f"{victims + 1} runs finished, the last one after {attempts} attempts")


def test_killed_while_checkpoints_are_written_aside(folder: Path) -> None:
    """The same with `--async-save`: after each step, so that one is always being written."""
    reference = folder / "every_step/killed"
    options = ("--async-save", "--save-interval", "1")
    began = time.monotonic()
    process = start(folder, "every_step", "--save-interval", "1")
    assert process.wait(timeout=180) == 0, (folder / "every_step.log").read_text()
    duration, draw, kills = time.monotonic() - began, random.Random(SEED), 0
    while kills < KILLS_BESIDE_WRITES:
        process = start(folder, "aside", *options)
        try:
            process.wait(timeout=draw.uniform(0, duration))
            break
        except subprocess.TimeoutExpired:
            kill(process, folder / "aside/killed")
            kills += 1
    if process.returncode != 0:
        process = start(folder, "aside", *options)
        assert process.wait(timeout=180) == 0, (folder / "aside.log").read_text()
    same(folder / "aside/killed", reference)
