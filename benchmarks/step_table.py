"""Tables of what a run's start and steps were spent on, from its folder.

python benchmarks/step_table.py runs/NAME
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

PARTS = (
    "rollout", "drain", "train", "update_weights", "sleep", "wake_up", "engine_sleep", "engine_wake_up", "save", "eval",
    "other",
)  # fmt: skip
MOVES = ("sleep", "wake_up", "engine_sleep", "engine_wake_up", "update_weights")
SHOWN_S = 0.05


def records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be growing; none if there is no such file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """Metrics of each step that a run has logged so far."""
    return [line["metrics"] for line in records(run_dir / "metrics.jsonl") if line["axis"] == "rollout/step"]


def differences(run_dir: Path) -> list[float]:
    """Mean absolute difference between the trainer's log-probs and the engine's, nats, of each optimizer step; none if the run
    does not compare them."""
    name = "train/train_rollout_logprob_abs_diff"
    return [line["metrics"][name] for line in records(run_dir / "metrics.jsonl") if name in line["metrics"]]


def table(run_dir: Path) -> str:
    """Markdown: seconds of each step by part, and seconds from the command to the end of the first step."""
    steps = steps_of(run_dir)
    lines = [
        f"| s of step | {' | '.join(str(number) for number in range(len(steps)))} |",
        f"|---|{'---:|' * len(steps)}",
    ]
    for part in (*PARTS, "score"):
        seconds = [step.get(f"perf/{part}_time", 0.0) for step in steps]
        if part == "score":
            lines.append(row("of train: until scores were there, with wake_up", seconds))
        elif max(seconds, default=0.0) >= 0.0005:
            lines.append(row(part, seconds))
    sums = [sum(step.get(f"perf/{part}_time", 0.0) for part in PARTS) for step in steps]
    moved = [sum(step.get(f"perf/{part}_time", 0.0) for part in MOVES) for step in steps]
    whole = [step["perf/step_time"] for step in steps]
    lines += [row("sum of the parts", sums), row("step", whole), row("of it moves and weight update", moved)]
    lines += [f"| tokens/s of rollout | {' | '.join(f'{speed(step):,.0f}' for step in steps)} |"]
    lines += [f"| tokens/s of training | {' | '.join(f'{trained(step):,.0f}' for step in steps)} |"]
    return "\n".join([*lines, "", *start_lines(run_dir, steps)])


def row(name: str, seconds: list[float]) -> str:
    return f"| {name} | {' | '.join(f'{value:.3f}' for value in seconds)} |"


def speed(step: dict[str, float]) -> float:
    """Response tokens per second and engine device, as the run counts them."""
    return step.get("perf/tokens_per_gpu_per_sec", 0.0)


def trained(step: dict[str, float]) -> float:
    return step.get("perf/train_tokens", 0.0) / max(step["perf/train_time"], 1e-9)


def start_lines(run_dir: Path, steps: list[dict[str, float]]) -> list[str]:
    """The last attempt's start by part; parts of one lane follow each other, lanes overlap."""
    starts = [line for line in records(run_dir / "events.jsonl") if line["event"] == "start_time"]
    if not starts:
        return ["no start_time in events.jsonl: the first step has not begun"]
    lines = ["| s of start | from | to | seconds |", "|---|---:|---:|---:|"]
    for part, start, end in starts[-1]["spans"]:
        if end - start >= SHOWN_S:
            lines.append(f"| {part} | {start:.1f} | {end:.1f} | {end - start:.1f} |")
    ready = starts[-1]["seconds"]
    lines.append(f"| ready | | {ready:.1f} | {ready:.1f} |")
    if steps:
        first = steps[0]["perf/step_time"]
        lines.append(f"| step 0 trained | {ready:.1f} | {ready + first:.1f} | {first:.1f} |")
    if len(steps) > 1:
        usual = statistics.median(step["perf/train_time"] for step in steps[1:])
        compiled = max(steps[0]["perf/train_time"] - usual, 0.0)
        lines.append(f"| of it training beyond a later step's (compilation, first use) | | | {compiled:.1f} |")
    return lines


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
