"""Comparison of off-policy corrections: GRPO on the arithmetic example, learning rate x optimizer steps per rollout x
staleness x engine, with and without each correction, over several seeds. Every run is a `slime run` of its own.

Staleness comes from `sync.update_weights_interval` and `rollout.max_async_level`. Trainer and engine agree to six digits
in this example; with the engine `float8` (rounded_engine.py) they differ. The source of old log-probs, and the correction:

  rollout     the engine's (use_rollout_logprobs): the clip of the loss measures from the policy that sampled
  opsm        the same, and off-policy sequence masking
  recomputed  the trainer's, before the first step on a batch: the loss ignores staleness and the engine
  tis, icepop, mis
              recomputed, and this correction; mis by sequence, masking sequences beyond its bounds

Options are the plugins' defaults otherwise. The learning rate is constant after two rollouts of warm-up.

`run` writes a JSON line for each run to --results and leaves out what is there already; flags choose from the grid. `report`
prints Markdown tables from these lines and draws the picture.

    python benchmarks/off_policy.py run --jobs 16
    python benchmarks/off_policy.py run --lr 1e-3 --steps 4 --staleness 4,1 --methods rollout tis --seeds 0 --rollouts 3
    python benchmarks/off_policy.py report
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from off_policy_figures import report
from off_policy_grid import ENGINES, GRID, LEFT_OUT, METHODS, Setting, setting_of

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "images" / "off-policy.png"
RUN_FILE = HERE.parent / "examples" / "arithmetic" / "run.toml"
LIBRARIES = ("slime-rl", "torch", "transformers")
RESULTS = Path("runs") / "off-policy.jsonl"


def command_of(setting: Setting, rollouts: int, prompts: int, slime: Path, runs_dir: Path) -> list[str]:
    use_rollout_logprobs, correction = METHODS[setting.method]
    return [
        *(str(slime), "run", str(RUN_FILE), "--name", setting.name, "--runs-dir", str(runs_dir), "--fresh", "--quiet"),
        *("--seed", str(setting.seed), "--device", "cpu", "--trackers", "jsonl", "--set", "checkpoint.save_hf=false"),
        *("--num-rollout", str(rollouts), "--rollout-batch-size", str(prompts)),
        *("--num-steps-per-rollout", str(setting.steps), "--lr", str(setting.lr), "--lr-decay-style", "constant"),
        *("--lr-warmup-iters", str(2 * setting.steps), "--update-weights-interval", str(setting.interval)),
        *("--max-async-level", str(setting.ahead), "--eval-interval", str(rollouts), "--skip-eval-before-train"),
        *ENGINES[setting.engine],
        *("--set", f"algo.use_rollout_logprobs={json.dumps(use_rollout_logprobs)}", "--corrections", f"[{correction}]"),
    ]


def measure(setting: Setting, asked: argparse.Namespace, folder: Path, deadline: float) -> dict[str, Any] | None:
    """None if there was no time left for it."""
    command = command_of(setting, asked.rollouts, asked.prompts, asked.slime, folder)
    if (left := deadline - time.monotonic()) <= 0:
        return None
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=left,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return None
    result: dict[str, Any] = asdict(setting) | {"rollouts": asked.rollouts, "prompts": asked.prompts}
    if done.returncode != 0:
        return result | {"failure": done.stdout[-1000:]}
    result |= figures_of(folder / setting.name, setting)
    shutil.rmtree(folder / setting.name)
    return result


def figures_of(run_dir: Path, setting: Setting) -> dict[str, Any]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    rollouts = [line["metrics"] for line in lines if line["axis"] == "rollout/step"]
    steps = [line["metrics"] for line in lines if line["axis"] == "train/step"]
    figures = {
        "accuracy": summary["eval"]["after"]["sampled"],
        "greedy": summary["eval"]["after"]["greedy"],
        "rewards": [round(rollout["rollout/raw_reward"], 4) for rollout in rollouts],
        "staleness": mean(rollout["rollout/staleness/mean"] for rollout in rollouts),
        "clipped": mean(step["train/pg_clipfrac"] for step in steps),
        "skipped_steps": sum(step.get("train/skipped_steps", 0.0) for step in steps),
        "seconds": summary["seconds"],
    }
    use_rollout_logprobs, _ = METHODS[setting.method]
    if not use_rollout_logprobs:
        figures["gap"] = mean(step["train/train_rollout_logprob_abs_diff"] for step in steps)
    if name := LEFT_OUT.get(setting.method):
        figures["left_out"] = mean(sum(value for key, value in step.items() if key.startswith(name)) for step in steps)
    return figures


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def settings(asked: argparse.Namespace) -> list[Setting]:
    """The settings of the grid that the flags select."""
    return [
        Setting(lr, block.steps, interval, ahead, block.engine, method, seed)
        for block in GRID
        for seed in asked.seeds
        for (interval, ahead), lr, method in itertools.product(block.staleness, block.lr, block.methods)
        if (asked.lr is None or lr in asked.lr)
        and (asked.steps is None or block.steps in asked.steps)
        and (asked.staleness is None or (interval, ahead) in asked.staleness)
        and (asked.engines is None or block.engine in asked.engines)
        and (asked.methods is None or method in asked.methods)
    ]


def sweep(asked: argparse.Namespace) -> bool:
    """Whether all has been run and nothing failed."""
    requested = settings(asked)
    there = {
        setting_of(line)
        for line in read(asked.results)
        if (line["rollouts"], line["prompts"]) == (asked.rollouts, asked.prompts) and "failure" not in line
    }
    missing = [setting for setting in requested if setting not in there]
    print(
        f"{datetime.date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, ",
        ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES),
        sep="",
    )
    print(f"{len(missing)} of {len(requested)} runs, {asked.jobs} at a time", flush=True)
    deadline = time.monotonic() + 60 * asked.minutes
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    complete = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(asked.jobs) as pool,
        asked.results.open("a") as results,
    ):
        runs = [pool.submit(measure, setting, asked, Path(folder), deadline) for setting in missing]
        for run in as_completed(runs):
            if (line := run.result()) is None:
                continue
            results.write(json.dumps(line) + "\n")
            results.flush()
            complete += "failure" not in line
            print(
                *setting_of(line).cell,
                line["method"],
                line["seed"],
                line.get("failure", line.get("accuracy")),
                flush=True,
            )
    print(f"{complete} of {len(missing)} runs complete", flush=True)
    return complete == len(missing)


def figures(asked: argparse.Namespace) -> bool:
    """Whether there was anything to report."""
    return report(read(asked.results), asked.picture)


def staleness(text: str) -> tuple[int, int]:
    interval, ahead = text.split(",")
    return int(interval), int(ahead)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    run = parts.add_parser("run", help="what is missing of the grid")
    run.set_defaults(part=sweep)
    run.add_argument("--lr", nargs="+", type=float)
    run.add_argument("--steps", nargs="+", type=int, help="optimizer steps per rollout")
    run.add_argument(
        "--staleness",
        nargs="+",
        type=staleness,
        metavar="INTERVAL,AHEAD",
        help="sync.update_weights_interval and rollout.max_async_level",
    )
    run.add_argument("--engines", nargs="+", choices=ENGINES)
    run.add_argument("--methods", nargs="+", choices=METHODS)
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    run.add_argument("--rollouts", type=int, default=30, help="rollout steps of a run")
    run.add_argument("--prompts", type=int, default=96, help="in a rollout, each with eight responses")
    run.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    run.add_argument(
        "--minutes", type=float, default=600.0, help="what is not complete by then is left for the next call"
    )
    run.add_argument("--slime", type=Path, default=Path(sys.executable).with_name("slime"))
    message = parts.add_parser("report", help="tables and picture")
    message.set_defaults(part=figures)
    message.add_argument("--picture", type=Path, default=PICTURE)
    for part in (run, message):
        part.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    sys.exit(0 if asked.part(asked) else 1)


if __name__ == "__main__":
    main()
