"""What off-policy corrections are worth: GRPO on the arithmetic example, learning rate x optimiser steps per rollout x
staleness x engine, with and without each correction, over several seeds. Every run is a `slime run` of its own.

Staleness comes from `sync.update_weights_interval` and `rollout.ahead`. Trainer and engine agree to six digits in this example;
the engine `float8` (rounded_engine.py) makes them differ. Where old log-probs come from, and what is corrected:

  rollout     the engine's (use_rollout_logprobs): the clip of the loss measures from the policy that sampled
  opsm        the same, and off-policy sequence masking
  recomputed  the trainer's, before the first step on a batch: the loss knows nothing of staleness, nor of the engine
  tis, icepop, mis
              recomputed, and this correction; mis by sequence, leaving out what is beyond its bounds

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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, TypeAlias

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
RUN_FILE = HERE.parent / "examples" / "arithmetic" / "run.toml"
ROUNDED_ENGINE = HERE / "rounded_engine.py"
PICTURE = HERE.parent / "docs" / "images" / "off-policy.png"
LIBRARIES = ("slime-core", "torch", "transformers")
RESULTS = Path("runs") / "off-policy.jsonl"

METHODS: dict[str, tuple[bool, str]] = {
    "rollout": (True, ""),
    "opsm": (True, '"opsm"'),
    "recomputed": (False, ""),
    "tis": (False, '"tis"'),
    "icepop": (False, '"icepop"'),
    "mis": (False, '{name = "mis", tis_level = "sequence", tis_mode = "mask"}'),
}
"""use_rollout_logprobs, and the correction as TOML."""
ENGINES: dict[str, list[str]] = {
    "float32": [],
    "float8": ["--plugin", str(ROUNDED_ENGINE), "--engine", "rounded", "--engine.weights", "float8_e4m3fn"],
}


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the grid: every combination."""

    steps: int
    lr: tuple[float, ...]
    staleness: tuple[tuple[int, int], ...]
    """update_weights_interval, ahead."""
    engine: str = "float32"
    methods: tuple[str, ...] = tuple(METHODS)


SOME, MANY, FEW = (3e-4, 1e-3, 2e-3), (1e-4, 3e-4), (3e-3,)
"""Learning rates for 4, 16 and 1 steps on a batch: where this batch size learns on-policy, and, for 4, where it does not."""
GRID = (
    Block(4, SOME, ((4, 1), (2, 1))),
    # On-policy and in float32 the gap is 0: all methods are the same up to rounding, but for opsm.
    Block(4, SOME, ((1, 0),), methods=("rollout",)),
    Block(16, MANY, ((4, 1),)),
    Block(16, MANY, ((1, 0),), methods=("rollout",)),
    Block(1, FEW, ((4, 1),)),
    Block(1, FEW, ((1, 0),), methods=("rollout",)),
    Block(4, (1e-3,), ((1, 0),), engine="float8"),
)
"""In the order in which it is run, each block seed by seed."""
LEFT_OUT = {
    "tis": "train/tis_clipfrac",
    "icepop": "train/tis_clipfrac",
    "mis": "train/mis_mask_fraction",
    "opsm": "train/opsm_clipfrac",
}
"""Share of trained tokens whose weight a correction bounds or takes away."""


class Cell(NamedTuple):
    """What all methods and seeds have in common."""

    lr: float
    steps: int
    interval: int
    ahead: int
    engine: str


Cells: TypeAlias = Mapping[Cell, Mapping[str, Sequence[Mapping[str, Any]]]]
"""The lines of each cell, by method."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    lr: float
    steps: int
    """Optimiser steps per rollout."""
    interval: int
    """update_weights_interval."""
    ahead: int
    engine: str
    method: str
    seed: int

    @property
    def cell(self) -> Cell:
        return Cell(self.lr, self.steps, self.interval, self.ahead, self.engine)

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())


def command_of(setting: Setting, rollouts: int, prompts: int, slime: Path, runs_dir: Path) -> list[str]:
    use_rollout_logprobs, correction = METHODS[setting.method]
    return [
        *(str(slime), "run", str(RUN_FILE), "--name", setting.name, "--runs-dir", str(runs_dir), "--fresh", "--quiet"),
        *("--seed", str(setting.seed), "--device", "cpu", "--trackers", "jsonl", "--set", "checkpoint.save_hf=false"),
        *("--num-rollout", str(rollouts), "--rollout-batch-size", str(prompts)),
        *("--num-steps-per-rollout", str(setting.steps), "--lr", str(setting.lr), "--lr-decay-style", "constant"),
        *("--lr-warmup-iters", str(2 * setting.steps), "--update-weights-interval", str(setting.interval)),
        *("--ahead", str(setting.ahead), "--eval-interval", str(rollouts), "--skip-eval-before-train"),
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


def setting_of(line: dict[str, Any]) -> Setting:
    return Setting(**{name: line[name] for name in Setting.__dataclass_fields__})


def settings(asked: argparse.Namespace) -> list[Setting]:
    """What of the grid the flags leave."""
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
    wanted = settings(asked)
    there = {
        setting_of(line)
        for line in read(asked.results)
        if (line["rollouts"], line["prompts"]) == (asked.rollouts, asked.prompts) and "failure" not in line
    }
    missing = [setting for setting in wanted if setting not in there]
    print(
        f"{datetime.date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, ",
        ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES),
        sep="",
    )
    print(f"{len(missing)} of {len(wanted)} runs, {asked.jobs} at a time", flush=True)
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


# --- figures ----------------------------------------------------------------------------------------------------------


def report(asked: argparse.Namespace) -> bool:
    """Whether there was anything to report."""
    lines, cells = read(asked.results), dict[Cell, dict[str, list[dict[str, Any]]]]()
    for line in lines:
        if "failure" not in line:
            setting = setting_of(line)
            cells.setdefault(setting.cell, {}).setdefault(setting.method, []).append(line)
    counts = [len(runs) for of_method in cells.values() for runs in of_method.values()]
    print(f"{sum(counts)} runs, {min(counts, default=0)} to {max(counts, default=0)} of a kind;", end=" ")
    print(f"{len(lines) - sum(counts)} failed\n")
    cells = dict(sorted(cells.items(), key=lambda item: (item[0].engine, item[0].steps, item[0].interval, item[0].lr)))
    print_accuracies(cells)
    print_gaps(cells)
    draw(cells, asked.picture)
    return bool(cells)


def print_accuracies(cells: Cells) -> None:
    print("| engine | steps | interval, ahead | lr |", " | ".join(METHODS), "|")
    print("|---|---:|---:|---:|" + "---:|" * len(METHODS))
    for cell, of_method in cells.items():
        values = [spread_of([line["accuracy"] for line in of_method.get(method, [])]) for method in METHODS]
        print(f"| {head_of(cell)} |", " | ".join(values), "|")
    print()


def print_gaps(cells: Cells) -> None:
    names = tuple(LEFT_OUT)
    print("| engine | steps | interval, ahead | lr | staleness | gap, nats |", " | ".join(names), "|")
    print("|---|---:|---:|---:|---:|---:|" + "---:|" * len(names))
    for cell, of_method in cells.items():
        lines = list(itertools.chain(*of_method.values()))
        # Of the runs that correct nothing: a correction changes the gap too.
        gaps = [line["gap"] for line in of_method.get("recomputed", [])]
        shares = [[line["left_out"] for line in of_method.get(name, [])] for name in names]
        print(
            f"| {head_of(cell)} | {mean(line['staleness'] for line in lines):.1f} |",
            " | ".join(
                [f"{mean(gaps):.2g}" if gaps else "", *(f"{mean(share):.1%}" if share else "" for share in shares)]
            ),
            "|",
        )
    print()


def head_of(cell: Cell) -> str:
    return f"{cell.engine} | {cell.steps} | {cell.interval}, {cell.ahead} | {cell.lr:g}"


def spread_of(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values)
    return f"{mean(values):.2f} ± {stdev(values):.2f}"


def draw(cells: Cells, path: Path) -> None:
    """Accuracy over learning rates: a panel for each number of steps and staleness, a line for each method."""
    stale = [cell for cell in cells if cell.engine == "float32" and (cell.interval, cell.ahead) != (1, 0)]
    panels = sorted({(cell.steps, cell.interval, cell.ahead) for cell in stale})
    figure = Figure(figsize=(3.1 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, (steps, interval, ahead) in zip(axes, panels, strict=True):
        lines = [
            ("on-policy", "rollout", (1, 0), "0.6"),
            *((m, m, (interval, ahead), f"C{i}") for i, m in enumerate(METHODS)),
        ]
        for place, (label, method, staleness, color) in enumerate(lines):
            points = [
                (cell.lr, [line["accuracy"] for line in of_method[method]])
                for cell, of_method in cells.items()
                if (cell.engine, cell.steps, cell.interval, cell.ahead) == ("float32", steps, *staleness)
                and method in of_method
            ]
            if not points:
                continue
            # Side by side, or the error bars would hide one another.
            panel.errorbar(
                [lr * 1.05 ** (place - len(lines) / 2) for lr, _ in points],
                [mean(values) for _, values in points],
                [stdev(values) if len(values) > 1 else 0.0 for _, values in points],
                color=color,
                linestyle="--" if label == "on-policy" else "-",
                label=label,
                linewidth=1.4,
                elinewidth=0.9,
                capsize=2,
                marker="o",
                markersize=3,
            )
        start = [line["rewards"][0] for cell in stale for runs in cells[cell].values() for line in runs]
        panel.axhline(mean(start), color="0.6", linestyle=":", linewidth=1, label="before")
        panel.set_xscale("log")
        rates = sorted({cell.lr for cell in stale if cell.steps == steps})
        panel.set_xticks(rates, [f"{lr:g}" for lr in rates])
        panel.minorticks_off()
        panel.set_title(f"{steps} step{'s' * (steps > 1)} a rollout, interval {interval}, ahead {ahead}", fontsize=9)
        panel.set_xlabel("learning rate")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out accuracy, sampled")
    # After all has been drawn: the panels share their scale.
    axes[0].set_ylim(0)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def staleness(text: str) -> tuple[int, int]:
    interval, ahead = text.split(",")
    return int(interval), int(ahead)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    run = parts.add_parser("run", help="what is missing of the grid")
    run.set_defaults(part=sweep)
    run.add_argument("--lr", nargs="+", type=float)
    run.add_argument("--steps", nargs="+", type=int, help="optimiser steps per rollout")
    run.add_argument(
        "--staleness",
        nargs="+",
        type=staleness,
        metavar="INTERVAL,AHEAD",
        help="sync.update_weights_interval and rollout.ahead",
    )
    run.add_argument("--engines", nargs="+", choices=ENGINES)
    run.add_argument("--methods", nargs="+", choices=METHODS)
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    run.add_argument("--rollouts", type=int, default=30, help="rollout steps of a run")
    run.add_argument("--prompts", type=int, default=96, help="in a rollout, each with eight answers")
    run.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    run.add_argument(
        "--minutes", type=float, default=600.0, help="what is not complete by then is left for the next call"
    )
    run.add_argument("--slime", type=Path, default=Path(sys.executable).with_name("slime"))
    figures = parts.add_parser("report", help="tables and picture")
    figures.set_defaults(part=report)
    figures.add_argument("--picture", type=Path, default=PICTURE)
    for part in (run, figures):
        part.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    sys.exit(0 if asked.part(asked) else 1)


if __name__ == "__main__":
    main()
