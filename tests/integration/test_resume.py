"""A run that is killed with SIGKILL, again and again, ends with the same bits as one that is not.

The instants are uniform over wall time. An observer records the phase of the run, which shows that every phase was hit; phases
too short to be hit by chance are then waited for.

The runs that are killed are forks of processes that have imported torch and transformers: else most instants would fall into
these imports, where nothing is on disk yet. There are two such processes, which take turns, as forks of one share its hash
seed. What they leave is compared with a run that was started, and a start ends the last one.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

if TYPE_CHECKING:
    from slime_plugin_kit.warm_slime import Forked, WarmSlime

pytestmark = pytest.mark.faults

STEPS = 48
UNIFORM_KILLS = 4
KILLS_BESIDE_WRITES = 2
PHASES = ("start", "rollout", "train", "save", "update_weights", "eval")
SEED = 20261121
# The error of the next start, if the kill came after the last save, while the process exited.
FINISHED = "this run is finished"

OBSERVER = '''
from pathlib import Path
from slime_core.plugin import hook, reward


@reward("has_digit")
def has_digit(sample):
    """1 if the label's digit is anywhere in the response."""
    return float(sample.prompt.label in sample.response)


def write_phase(event, phase):
    (event.run.run_dir / "phase").write_text(phase)


@hook
def run_start(event):
    write_phase(event, "update_weights")


@hook
def update_weights_end(event):
    write_phase(event, "eval")


@hook
def rollout_start(event):
    write_phase(event, "rollout")


@hook
def rollout_end(event):
    write_phase(event, "train")


@hook
def step_trained(event):
    write_phase(event, "save")


@hook
def update_weights_start(event):
    write_phase(event, "update_weights")
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


Start: TypeAlias = "Callable[..., Forked]"


@pytest.fixture(scope="module")
def folder(warm: WarmSlime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    sizes = ["--hidden-size", "32", "--num-layers", "1", "--num-heads", "2", "--intermediate-size", "64"]
    code, _, err = warm.run(["models", "new", "base", "--alphabet", "0123456789+=", *sizes], folder)
    assert code == 0, err
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(200)]
    rows = [{"prompt": f"{a}+{b}=", "label": str((a + b) % 10)} for a, b in pairs]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "observer.py").write_text(OBSERVER)
    (folder / "run.toml").write_text(RUN)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Path:
    """A run that is not killed, for comparison."""
    slime(folder, *run_words("reference"))
    reference = folder / "reference/killed"
    assert len({line["rollout_id"] for line in record(reference)}) == STEPS + 1
    return reference


@pytest.fixture
def start(folder: Path, warm_pair: tuple[WarmSlime, WarmSlime]) -> Start:
    """Starts or resumes the run in the folder of that name."""
    turns = itertools.cycle(warm_pair)
    return lambda runs, *more: next(turns).start(run_words(runs, *more), folder)


def run_words(runs: str, *more: str) -> list[str]:
    return ["run", "run.toml", "--runs-dir", runs, "--quiet", *more]


def slime(folder: Path, *words: str) -> None:
    """In a process that is started."""
    command = [sys.executable, "-c", "from slime_core.cli.main import main; main()", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or FINISHED in done.stderr, done.stderr


def join(run: Forked, timeout_s: float | None = None) -> None:
    """Waits until the run has ended without an error. subprocess.TimeoutExpired if it has not by then."""
    assert run.wait(timeout_s) == 0 or FINISHED in run.err, run.err


def timed(run: Forked) -> float:
    """Seconds from the start to the end without an error."""
    began = time.monotonic()
    assert run.wait() == 0, run.err
    return time.monotonic() - began


def phase_of(run_dir: Path) -> str:
    try:
        # Empty for the moment in which it is written anew.
        return (run_dir / "phase").read_text() or "start"
    except FileNotFoundError:
        return "start"


def kill(run: Forked, run_dir: Path) -> str:
    """Kills the run and returns the phase that it was in; its reward workers end by themselves."""
    phase = phase_of(run_dir)
    run.kill()
    (run_dir / "phase").unlink(missing_ok=True)
    return phase


def record(run_dir: Path) -> list[dict[str, object]]:
    """The logged metrics, without times and attempts."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("attempt")
        line["metrics"] = {name: value for name, value in line["metrics"].items() if not name.startswith("perf/")}
    return lines


def same(left: Path, right: Path) -> None:
    assert record(left) == record(right)
    assert (left / "hf/model.safetensors").read_bytes() == (right / "hf/model.safetensors").read_bytes()


def test_killed_equals_not_killed(folder: Path, reference: Path, start: Start) -> None:
    duration = timed(start("again"))
    same(folder / "again/killed", reference)

    draw, hit, victims = random.Random(SEED), Counter[str](), 0
    while hit.total() < UNIFORM_KILLS:
        run_dir = folder / f"victim{victims}/killed"
        run = start(f"victim{victims}")
        try:
            join(run, draw.uniform(0, duration))
        except subprocess.TimeoutExpired:
            hit[kill(run, run_dir)] += 1
        else:
            same(run_dir, reference)
            victims += 1
    print(f"\n{hit.total()} kills at instants uniform over {duration:.1f} s, by phase: {dict(hit)}")

    waited = [phase for phase in PHASES if not hit[phase]]
    for phase in waited:
        while not hit[phase]:
            run_dir = folder / f"victim{victims}/killed"
            run, was_killed = start(f"victim{victims}"), False
            while not run.has_ended():
                if phase_of(run_dir) == phase:
                    # It may be in the next one by then.
                    hit[kill(run, run_dir)] += 1
                    was_killed = True
            if not was_killed:
                join(run)
                same(run_dir, reference)
                victims += 1
    print(f"phases that were waited for: {waited or 'none'}; all kills: {dict(hit)}")

    slime(folder, *run_words(f"victim{victims}"))
    same(folder / f"victim{victims}/killed", reference)
    attempts = json.loads((folder / f"victim{victims}/killed/attempts").read_text())
    print(f"{victims + 1} runs finished, the last one after {attempts} attempts")


def test_killed_while_checkpoints_are_written_aside(folder: Path, reference: Path, start: Start) -> None:
    """The same with `--async-save`: after each step, so that one is always being written. When and how a run saves changes
    nothing about it."""
    options = ("--async-save", "--save-interval", "1")
    duration, draw, kills = timed(start("every_step", *options)), random.Random(SEED), 0
    same(folder / "every_step/killed", reference)
    run = start("aside", *options)
    while kills < KILLS_BESIDE_WRITES:
        try:
            run.wait(draw.uniform(0, duration))
            break
        except subprocess.TimeoutExpired:
            kill(run, folder / "aside/killed")
            kills += 1
            run = start("aside", *options)
    join(run)
    same(folder / "aside/killed", reference)
