"""Tables and the picture of off_policy.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from off_policy_grid import LEFT_OUT, METHODS, Cell, Cells, setting_of


def report(lines: Sequence[dict[str, Any]], picture: Path) -> bool:
    """Whether there was anything to report in these lines of results."""
    cells = dict[Cell, dict[str, list[dict[str, Any]]]]()
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
    draw(cells, picture)
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
        # From the runs without correction, since a correction changes the gap too.
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
