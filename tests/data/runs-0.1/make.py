"""Made the folders beside it, with slime 0.1 (commit 5a644e6): runs that were killed, and the same runs uninterrupted.

    slime-0.1/.venv/bin/python make.py /srv/runs-0.1

`/srv/runs-0.1` is where the runs were; their manifests say so. It must not exist, and is copied here afterwards. Kept for the
record: later slimes write other folders.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
SLIME: Final = str(Path(sys.executable).with_name("slime"))
SIZES: Final = (
    "--hidden-size",
    "16",
    "--num-layers",
    "1",
    "--num-heads",
    "2",
    "--num-kv-heads",
    "1",
    "--max-length",
    "64",
)
NAMES: Final = ("sync", "ahead", "pool")
KILLED_AFTER: Final = "checkpoints/step_2/COMPLETE"
NEXT: Final = "checkpoints/step_4"
NOT_KEPT: Final = (".lock", "events.jsonl")
RUN: Final = """\
name = "{name}"
seed = 5
backend = "fsdp"
engine = "local"
reward = "random"
runs_dir = "unfinished"
{rest}
[model]
hf_checkpoint = "base"

[data]
prompt_data = "train.jsonl"
input_key = "prompt"
label_key = "label"
rollout_shuffle = true

[train]
num_rollout = 4
num_steps_per_rollout = 2
lr = 1e-2

[checkpoint]
save_interval = 2
keep_checkpoints = 1
"""
ROLLOUT: Final = """\
[rollout]
rollout_batch_size = 4
n_samples_per_prompt = 4
"""
RESTS: Final = {
    # A reference model, a filter and an evaluation that is owed.
    "sync": f"""\
algo = {{ name = "grpo", kl_loss_coef = 0.01 }}
eval = {{ eval_interval = 2, datasets = {{ held_out = {{ path = "train.jsonl@[0:8]" }} }} }}

{ROLLOUT}rollout_max_response_len = 8
filters = ["nonzero_std"]
over_sampling_batch_size = 6
""",
    # One step is generated while the one before is trained: the checkpoint has the groups of the next step.
    "ahead": f"""\
algo = {{ name = "grpo", corrections = ["tis"] }}

{ROLLOUT}rollout_max_response_len = 8
ahead = 1
""",
    # Fully asynchronous: the checkpoint has groups that were broken off.
    "pool": f"""\
algo = "grpo"

{ROLLOUT}rollout_max_response_len = 48
ahead = 2
partial_rollout = true
over_sampling_batch_size = 8
max_staleness = 6
dump_rollouts = true
""",
}


def slime(folder: Path, *words: str) -> None:
    subprocess.run([SLIME, *words], cwd=folder, env=environment(), check=True)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    slime(folder, "models", "new", "base", "--alphabet", "0123456789+=", "--intermediate-size", "32", *SIZES)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in NAMES:
        (folder / f"{name}.toml").write_text(RUN.format(name=name, rest=RESTS[name]))
        kill(folder, name)
        slime(folder, "run", f"{name}.toml", "--runs-dir", "uninterrupted")
    for name in NAMES:
        keep_end(folder / "uninterrupted" / name, folder / "ends" / name)
        for left_out in NOT_KEPT:
            (folder / "unfinished" / name / left_out).unlink()
    shutil.copytree(folder, HERE, dirs_exist_ok=True, ignore=shutil.ignore_patterns("uninterrupted"))


def kill(folder: Path, name: str) -> None:
    """Starts the run and kills it as soon as it has saved step 2."""
    process = subprocess.Popen([SLIME, "run", f"{name}.toml", "--quiet"], cwd=folder, env=environment())
    run = folder / "unfinished" / name
    while not (run / KILLED_AFTER).exists():
        assert process.poll() is None, f"{name}: ended with {process.returncode}"
        time.sleep(0.0005)
    process.kill()
    process.wait()
    assert not (run / NEXT).exists(), f"{name}: went on to the next checkpoint"
    assert not (run / "summary.json").exists(), f"{name}: had ended"


def keep_end(run: Path, end: Path) -> None:
    """What the uninterrupted run logged, and its last weights."""
    end.mkdir(parents=True)
    shutil.copy(run / "metrics.jsonl", end)
    shutil.copy(run / "hf/model.safetensors", end)


if __name__ == "__main__":
    main()
