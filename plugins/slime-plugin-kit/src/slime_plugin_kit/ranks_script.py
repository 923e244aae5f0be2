"""Run as a script: optimizer steps of backends on several ranks, over gloo.

Each line on standard input is a JSON object, for one step; a line on standard output reports its end, with `ok` or the
error. The ranks are forked from this process: what it imports, and what a backend imports while it is built, takes
longer than all the rest. Each leaves `rank_R.pt` in the folder `out`: its scores, the sums that it reports, and, from the
first rank, the exported weights.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.multiprocessing as mp

from slime_core.config.part import BoundPlugin, PluginSpec
from slime_core.registry import Registry
from slime_core.registry.boundary import held
from slime_plugin_kit.tiny_training import LARGE, OVERFLOWING, PROMPTS, Place, TrainingBatch, objective_of, opened

OK: Final = "ok"


def run_rank(rank: int, part: BoundPlugin, request: dict[str, Any]) -> None:
    out = Path(request["out"])
    place = Place(
        model=Path(request["model"]),
        rank=rank,
        world_size=request["world_size"],
        rendezvous=f"file://{out / 'rendezvous'}",
    )
    training = TrainingBatch.make()
    with opened(part.build(), place) as rank_of:
        layout = rank_of.layout
        mine = tuple(range(layout.dp_rank, len(PROMPTS), layout.dp_size))
        # Every rank has as many micro-batches, of which one may be empty.
        split = (mine[:2], mine[2:], ()) if layout.dp_rank else (mine[:1], mine[1:3], mine[3:])
        scores = rank_of.scores(training, (mine,))
        # Gradients of the first call are summed over the ranks before those of the second are.
        for called in (split[:1], split[1:]):
            rank_of.backend.forward_backward(training.micros(called), objective_of())
        report = rank_of.backend.optim_step()
        weights = rank_of.weights()
        state = {
            "log_probs": torch.from_numpy(scores["log_probs"]),
            "sums": dict(report.sums) if layout.reports else {},
            "grad_norm": report.grad_norm,
            "weights": weights,
        }
    with opened(part.build(), replace(place, rendezvous=f"{place.rendezvous}_2"), optimizer=OVERFLOWING) as rank_of:
        report = rank_of.backend.train_step(training.micros(split), objective_of(factor=LARGE))
        state["nonfinite"] = report.nonfinite
    torch.save(state, out / f"rank_{rank}.pt")


def step(request: dict[str, Any]) -> None:
    registry = Registry([Path(path) for path in request["files"]])
    part = PluginSpec.from_json(request["part"]).resolve(registry)
    # Built once here too, so that what it imports is imported before the ranks are forked.
    part.build()
    start: Any = mp.start_processes  # type: ignore[attr-defined]
    start(run_rank, (part, request), nprocs=request["world_size"], start_method="fork")


def serve(work: Callable[[dict[str, Any]], None]) -> None:
    """Calls `work` with each object on standard input, until that ends."""
    # Whatever backends print goes with their errors.
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        with held() as failed:
            work(json.loads(line))
        # The test of this case reports it, the others continue.
        response = OK if failed.raised is None else "".join(traceback.format_exception(failed.raised))
        print(json.dumps(response), file=responses, flush=True)


if __name__ == "__main__":
    serve(step)
