"""Trains with each algorithm on the arithmetic example: one `slime run` per algorithm and seed, one after the other.

Reinforcement learning starts from the warm start and must reach an accuracy of --goal on problems it has not seen. `sft`
starts from random weights and must reach that warm start; `opd` must come within --behind of its teacher, which is the
result of the first algorithm with the same seed. Exit code 1 if a run fails or does not reach the accuracy on one of its
evaluation sets. Draws all curves in one figure. Arguments after `--` are passed to `slime run`. `--vary` runs everything once
with each of its arguments, separated by `|`; given several times, with every combination.

    python benchmarks/learn.py
    python benchmarks/learn.py --algos grpo gspo --seeds 0 1 2 -- --num-rollout 30
    python benchmarks/learn.py --run-file examples/vllm/run.toml --algos grpo -- --launcher ray

The task on vLLM's servers with each backend and launcher, and the largest mismatch of trainer and engine in any step:

    python benchmarks/learn.py --run-file examples/vllm/run.toml --algos grpo --vary "--backend fsdp | --backend megatron" \\
        --vary "| --launcher ray" --max-mismatch 1e-5 -- --set algo.use_rollout_logprobs=false
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from slime_core import groups
from slime_core.registry import Registry

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "arithmetic"
RUN_FILE = EXAMPLE / "run.toml"
OPD, SFT = "opd", "sft"
OWN_RUN_FILES = {OPD: EXAMPLE.parent / "distill" / "run.toml", SFT: EXAMPLE.parent / "sft" / "run.toml"}
"""Algorithms that do not learn from rewards."""
PICTURE = ROOT / "docs" / "images" / "learning-curves.png"
MISMATCH = "train/train_rollout_logprob_abs_diff"
SLIME = Path(sys.executable).with_name("slime")


@dataclass(frozen=True, slots=True)
class Learned:
    """The result of one run."""

    algo: str
    seed: int
    varied: str = ""
    """Of `--vary`."""
    failure: str = ""
    """The end of its output, if it failed."""
    steps: int = 0
    seconds: float = 0.0
    before: dict[str, float] | None = None
    """Accuracy of each evaluation set."""
    after: dict[str, float] | None = None
    curves: dict[str, list[tuple[int, float]]] | None = None
    """By evaluation set: rollout steps trained, accuracy."""
    required: dict[str, float] | None = None
    """The accuracy to reach on each evaluation set."""
    mismatch: float | None = None
    """Largest mean distance of trainer's and engine's log-probs in a step, in nats."""
    max_mismatch: float | None = None

    @property
    def label(self) -> str:
        return f"{self.algo} {self.varied}".strip()

    @property
    def passes(self) -> bool:
        if not self.after or not self.required:
            return False
        if self.max_mismatch is not None and (self.mismatch is None or not self.mismatch < self.max_mismatch):
            return False
        return all(self.after[name] >= accuracy for name, accuracy in self.required.items())


def usable_algorithms(run_file: Path, extra: Sequence[str], console: Console) -> list[str]:
    """Registered algorithms that can use the run file unchanged, then those with a run file of their own. Prints why others
    cannot."""
    names = {entry.name for entry in Registry.from_environment().entries(groups.ALGORITHMS)}
    usable = []
    for name in sorted(names - OWN_RUN_FILES.keys()):
        tried = subprocess.run(
            [str(SLIME), "run", str(run_file), "--algo", name, "--dry-run", *extra], capture_output=True, text=True
        )
        if tried.returncode == 0:
            usable.append(name)
        else:
            console.print(f"without {name}: {tried.stderr.strip()}", markup=False)
    return [*usable, *OWN_RUN_FILES]


def name_of(algo: str, seed: int, varied: str) -> str:
    """Of the run's folder."""
    return "-".join([algo, *(re.sub(r"[^\w.=]+", "-", word.lstrip("-")) for word in shlex.split(varied)), str(seed)])


def learn(
    run_file: Path, algo: str, seed: int, varied: str, teacher: Path | None, runs_dir: Path, extra: Sequence[str]
) -> Learned:
    """Runs `slime run` from the start, even if its folder exists."""
    name = name_of(algo, seed, varied)
    command = [str(SLIME), "run", str(OWN_RUN_FILES.get(algo, run_file)), "--seed", str(seed)]
    if algo not in OWN_RUN_FILES:
        command += ["--algo", algo]
    if algo == OPD and teacher is not None:
        command += ["--opd-teacher-load", str(teacher)]
    command += ["--name", name, "--runs-dir", str(runs_dir), "--fresh", *shlex.split(varied), *extra]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        return Learned(
            algo, seed, varied, failure=f"{done.stdout[-2000:]}\n{shlex.join(command)}: exit code {done.returncode}"
        )
    summary = json.loads((runs_dir / name / "summary.json").read_text())
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (runs_dir / name / "metrics.jsonl").read_text().splitlines()
    ]
    return Learned(
        algo,
        seed,
        varied,
        steps=summary["steps"],
        seconds=summary["seconds"],
        before=summary["eval"]["before"],
        after=summary["eval"]["after"],
        curves=curves_of(lines, list(summary["eval"]["after"])),
        mismatch=max((line["metrics"][MISMATCH] for line in lines if MISMATCH in line["metrics"]), default=None),
    )


def curves_of(lines: Sequence[dict[str, Any]], sets: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    evals = [line for line in lines if line["axis"] == "eval/step"]
    return {name: [(line["step"], line["metrics"][f"eval/{name}"]) for line in evals] for name in sets}


def line_of(run: Learned) -> str:
    """The line that is printed when a run has ended."""
    if run.before is None or run.after is None:
        return run.failure
    sets = ", ".join(f"{name} {run.before[name]:.3f} -> {run.after[name]:.3f}" for name in run.after)
    mismatch = "" if run.mismatch is None else f", mismatch {run.mismatch:.1e}"
    return f"{run.label}, seed {run.seed}: {sets} in {run.steps} steps, {run.seconds:.0f} s{mismatch}"


def with_goals(runs: Sequence[Learned], goal: float, behind: float) -> list[Learned]:
    """The runs with their required accuracy: `goal`, the teacher's accuracy minus `behind`, or the others' warm start."""
    judged = []
    for run in runs:
        first = next((r for r in runs if r.seed == run.seed and r.algo not in OWN_RUN_FILES and r.after), None)
        if run.algo not in OWN_RUN_FILES:
            required: dict[str, float] | None = dict.fromkeys(run.after or {}, goal)
        elif first is None or first.before is None or first.after is None:
            required = None
        elif run.algo == OPD:
            required = {name: accuracy - behind for name, accuracy in first.after.items()}
        else:
            required = first.before
        judged.append(replace(run, required=required))
    return judged


def table_of(runs: Sequence[Learned]) -> Table:
    sets = list(dict.fromkeys(name for run in runs for name in run.after or {}))
    table = Table(box=SIMPLE, title="held-out accuracy, before and after; in brackets the required accuracy")
    for title in ("algorithm", "seed", *sets, "steps", "seconds", ""):
        table.add_column(title, justify="left" if title in ("algorithm", "") else "right", no_wrap=True)
    for run in runs:
        if run.before is None or run.after is None:
            table.add_row(run.label, str(run.seed), *("" for _ in sets), "", "", "[red]failed[/]")
            continue
        required = {name: "?" if run.required is None else f"{run.required[name]:.2f}" for name in run.after}
        accuracies = [f"{run.before[name]:.3f} → {run.after[name]:.3f} ({required[name]})" for name in sets]
        verdict = "[green]learns[/]" if run.passes else "[red]too little[/]"
        table.add_row(run.label, str(run.seed), *accuracies, str(run.steps), f"{run.seconds:.0f}", verdict)
    return table


def draw(runs: Sequence[Learned], path: Path) -> None:
    """A panel for each evaluation set; a colour for each algorithm, a line for each seed."""
    drawn = [run for run in runs if run.curves]
    sets = list(dict.fromkeys(name for run in drawn for name in run.curves or {}))
    if not sets:
        return
    labels = list(dict.fromkeys(run.label for run in drawn))
    figure = Figure(figsize=(4.6 * len(sets) + 2.4, 3.6), layout="constrained")
    colours = colormaps["tab20"].colors
    axes = figure.subplots(1, len(sets), sharex=True, sharey=True, squeeze=False)[0]
    for panel, name in zip(axes, sets, strict=True):
        for run in drawn:
            points = (run.curves or {})[name]
            first = run is next(other for other in drawn if other.label == run.label)
            number = labels.index(run.label)
            panel.plot(
                [step for step, _ in points],
                [accuracy for _, accuracy in points],
                color="black" if run.algo == SFT else colours[(2 * number + number // 10) % 20],
                linestyle="--" if run.algo in OWN_RUN_FILES else "-",
                label=run.label if first else None,
                linewidth=1.6,
                marker="o",
                markersize=3,
            )
        panel.set_title(name)
        panel.set_xlabel("rollout steps")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out accuracy")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    own, extra = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", nargs="+", metavar="NAME", help="by default all that the example can be run with")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N")
    parser.add_argument("--run-file", type=Path, default=RUN_FILE, help="another one of the same task")
    parser.add_argument("--goal", type=float, default=0.8, help="accuracy to reach on every evaluation set")
    parser.add_argument("--behind", type=float, default=0.05, help="how far opd may stay behind its teacher")
    parser.add_argument("--vary", action="append", default=[], metavar='"FLAGS | FLAGS"')
    parser.add_argument("--max-mismatch", type=float, help="of trainer and engine, in nats, in every step")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs") / "learn", help="what is there is overwritten")
    asked = parser.parse_args(own)

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    runs: list[Learned] = []
    teachers: dict[int, Path] = {}
    algos = asked.algos or usable_algorithms(asked.run_file, extra, console)
    variants = [
        " ".join(filter(None, words))
        for words in itertools.product(*([flags.strip() for flags in vary.split("|")] for vary in asked.vary))
    ]
    for algo, varied, seed in itertools.product(algos, variants, asked.seeds):
        run = learn(asked.run_file, algo, seed, varied, teachers.get(seed), asked.runs_dir, extra)
        run = replace(run, max_mismatch=asked.max_mismatch)
        console.print(line_of(run), markup=False)
        runs.append(run)
        if algo not in OWN_RUN_FILES and run.after:
            teachers.setdefault(seed, (asked.runs_dir / name_of(algo, seed, varied) / "hf").resolve())
    runs = with_goals(runs, asked.goal, asked.behind)
    console.print(table_of(runs))
    draw(runs, asked.picture)
    if not runs or not all(run.passes for run in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
