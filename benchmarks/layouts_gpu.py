"""A backend's training step in several layouts: the same as on one GPU? And how fast?

    python benchmarks/layouts_gpu.py --ranks 2
    python benchmarks/layouts_gpu.py --ranks 2 --layouts tp,pp --shape qwen3-4b --options '{"recompute_granularity": "full"}'
    python benchmarks/layouts_gpu.py --ranks 2 --backend fsdp
    python benchmarks/layouts_gpu.py --ranks 2 --device cpu --shape tiny --moe-shape tiny-moe --tokens 256 --longest 96

Each layout has its own processes; a failure is reported, and the next layout starts. All run the same --parity-steps on one
batch, whose old log-probs are those before the first step; then --steps are timed on new batches. Layouts of a mixture of
experts (ep) are compared with one GPU on it; one GPU always comes first. Prints a JSON line for each layout, at the
end a table of losses and gradient norms side by side, and exits with 1 if one is further from one GPU than the tolerance:

    gradient norm of each parity step     relative, --norm-tolerance
    loss of each parity step              of the largest change from the first step, and of 1e-3 at least: --loss-tolerance
    log-probs before and after them       mean absolute difference of tokens, --log-prob-tolerance

What is computed in bfloat16 is not the same twice. Layout `again` is one GPU with its micro-batches in the other order: Adam's
first steps are as large where a gradient is but noise. Where it ran, log-probs of layouts behind it may be half as far again
from one GPU's after the steps as its own.

`mfu` is that of `train_gpu.py`, for each GPU; of a mixture of experts, parameters that a token is computed with count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_gpu import PEAK_FLOPS, SHAPES, active_parameters, add_sequences, make_batch, write_model

from slime_core import groups
from slime_core.algorithm.loss import TokenObjective
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.backend import TrainBackend
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import TrainerSetup
from slime_core.registry import Registry, bind
from slime_core.types.batch import Batch, TokenColumns


@dataclass(frozen=True)
class LayoutCase:
    options: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    """On one GPU: the layout that the others are compared with."""
    backwards: bool = False
    """One GPU with its micro-batches in the reverse order: the difference between equal computations."""
    experts: bool = False


LAYOUTS = {
    "megatron": {
        "one": LayoutCase(alone=True),
        "again": LayoutCase(alone=True, backwards=True),
        "dp": LayoutCase(),
        "tp": LayoutCase({"tensor_model_parallel_size": "ranks", "sequence_parallel": True}),
        "pp": LayoutCase({"pipeline_model_parallel_size": "ranks"}),
        "cp": LayoutCase({"context_parallel_size": "ranks"}),
        "moe-one": LayoutCase(alone=True, experts=True),
        "ep": LayoutCase({"expert_model_parallel_size": "ranks"}, experts=True),
    },
    "fsdp": {
        "one": LayoutCase(alone=True),
        "again": LayoutCase(alone=True, backwards=True),
        "dp": LayoutCase(),
        "cp": LayoutCase({"context_parallel_size": "ranks"}),
        "moe-one": LayoutCase(alone=True, experts=True),
        "moe-dp": LayoutCase(experts=True),
    },
}


@dataclass(kw_only=True)
class Rank:
    """One process of a layout."""

    asked: argparse.Namespace
    backend: TrainBackend
    layout: Any
    objective: TokenObjective
    backwards: bool

    @classmethod
    def start(cls, asked: argparse.Namespace, spec: dict[str, Any]) -> Rank:
        registry = Registry()
        resolved = registry.resolve(groups.BACKENDS, asked.backend, where="backend")
        config = bind(resolved, spec["options"], where="backend")
        clip = registry.resolve(groups.LOSSES, "clip", where="algo.loss")
        backend = resolved.driver.build(config)
        layout = backend.setup(
            TrainerSetup(
                role="actor",
                rank=spec["rank"],
                world_size=spec["world_size"],
                local_rank=spec["rank"],
                rendezvous=spec["rendezvous"],
                device=asked.device,
                model_path=Path(spec["model"]),
                optimizer=OptimizerConfig(lr=asked.lr),
                total_steps=100,
                seed=0,
            )
        )
        objective = TokenObjective(
            loss=clip.driver.build(bind(clip, {}, where="algo.loss")), needs=frozenset(clip.driver.needs)
        )
        return cls(asked=asked, backend=backend, layout=layout, objective=objective, backwards=spec["backwards"])

    def batch(self, seed: int, vocab: int) -> tuple[Batch, list[np.ndarray]]:
        """The same on every rank, and this one's micro-batches of it."""
        batch, parts = make_batch(self.asked, vocab, seed)
        mine = parts[self.layout.dp_rank :: self.layout.dp_size]
        return batch, mine[::-1] if self.backwards else mine

    def score(self, batch: Batch, parts: list[np.ndarray]) -> np.ndarray:
        """(M,) float32 of all response tokens; NaN where other ranks hold them. Ranks that share matrices all need theirs."""
        found = np.full(len(batch.mask), np.nan, np.float32)
        scores = self.backend.forward_only([pack_micro_batch(batch, part) for part in parts])
        for part, of_part in zip(parts, scores, strict=True):
            rows = batch.response_rows(part)
            found[rows if of_part.rows is None else rows[of_part.rows]] = of_part.log_probs
        return found

    def step(self, batch: Batch, parts: list[np.ndarray], old: np.ndarray, seed: int) -> Any:
        columns = TokenColumns(
            old_log_probs=np.nan_to_num(old),
            advantages=np.random.default_rng(seed).standard_normal(len(batch.mask)).astype(np.float32),
            loss_weight=np.full(len(batch.mask), 1 / len(batch.mask), np.float32),
        )
        report = self.backend.train_step(
            [pack_micro_batch(batch, part, columns=columns) for part in parts], self.objective
        )
        if report.skipped:
            raise RuntimeError("a step was skipped")
        return report


def run_rank(asked: argparse.Namespace, spec: dict[str, Any]) -> None:
    vocab = SHAPES[spec["shape"]]["vocab_size"]
    rank = Rank.start(asked, spec)
    batch, parts = rank.batch(0, vocab)
    before = old = rank.score(batch, parts)
    reports = [rank.step(batch, parts, old, 0) for _ in range(asked.parity_steps)]
    after = rank.score(batch, parts)
    if asked.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if asked.profile:
        batch, parts = rank.batch(1, vocab)
        old = rank.score(batch, parts)
        with torch.profiler.profile() as profile:
            rank.step(batch, parts, old, 1)
        by = "self_device_time_total" if asked.device == "cuda" else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60)
        (Path(spec["out"]) / f"profile_{spec['rank']}").write_text(table)
    seconds = []
    for seed in range(1, 1 + asked.warmup + asked.steps):
        batch, parts = rank.batch(seed, vocab)
        old = rank.score(batch, parts)
        if asked.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        rank.step(batch, parts, old, seed)
        if asked.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    result = {
        "losses": [report.sums["loss"] for report in reports] if rank.layout.reports else [0.0] * len(reports),
        "norms": [report.grad_norm for report in reports],
        "step_s": statistics.median(seconds[asked.warmup :]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if asked.device == "cuda" else 0.0,
    }
    out = Path(spec["out"])
    np.save(out / f"log_probs_{spec['rank']}.npy", np.stack([before, after]))
    (out / f"rank_{spec['rank']}.json").write_text(json.dumps(result))
    rank.backend.close()


def run_layout(name: str, case: LayoutCase, model: Path, shape: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The results of its ranks, merged; `error` instead if a rank failed."""
    world_size = 1 if case.alone else asked.ranks
    options = asked.options | {k: asked.ranks if v == "ranks" else v for k, v in case.options.items()}
    # As in the launchers: ranks with more threads in total than cores would wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size))}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        processes = []
        for rank in range(world_size):
            spec = {
                "rank": rank,
                "world_size": world_size,
                "rendezvous": f"file://{out / 'rendezvous'}",
                "options": options,
                "backwards": case.backwards,
                "model": str(model),
                "shape": shape,
                "out": str(out),
            }
            with (out / f"log_{rank}").open("wb") as log:
                command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--spec", json.dumps(spec)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        problem = wait_for(processes, asked.timeout)
        if problem:
            logs = [(out / f"log_{rank}").read_text(errors="replace") for rank in range(world_size)]
            last = next((log for log in logs if "Error" in log), logs[0]).strip().splitlines()[-12:]
            error = f"{problem}: {last[-1] if last else 'no output'}"
            return {"layout": name, "shape": shape, "options": options, "error": error, "log": last}
        results = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(world_size)]
        columns = [np.load(out / f"log_probs_{rank}.npy") for rank in range(world_size)]
        if asked.profile:
            print((out / "profile_0").read_text(), file=sys.stderr)
    log_probs = columns[0]
    for column in columns[1:]:
        log_probs = np.where(np.isnan(log_probs), column, log_probs)
    step_s = max(result["step_s"] for result in results)
    speed = asked.micros * asked.tokens / step_s / world_size
    sizes = SHAPES[shape]
    per_token = (
        6 * active_parameters(model, sizes) + 12 * sizes["num_hidden_layers"] * sizes["hidden_size"] * asked.longest
    )
    return {
        "layout": name,
        "shape": shape,
        "ranks": world_size,
        "options": options,
        "losses": [sum(result["losses"][step] for result in results) for step in range(asked.parity_steps)],
        "norms": results[0]["norms"],
        "log_probs": log_probs,
        "step_s": round(step_s, 4),
        "tok_per_s_per_gpu": round(speed),
        "mfu": round(speed * per_token / PEAK_FLOPS, 3),
        "peak_gib": round(max(result["peak_gib"] for result in results), 2),
    }


def wait_for(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Waits for all ranks, and returns the problem, or "". If a rank fails, the others would wait for it: they are killed."""
    deadline, problem = time.monotonic() + timeout_s, ""
    while not problem and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            problem = "a rank failed"
        elif time.monotonic() > deadline:
            problem = f"not done after {timeout_s:g} s"
        time.sleep(0.2)
    for process in processes:
        process.kill()
        process.wait()
    return problem or ("a rank failed" if any(process.returncode for process in processes) else "")


AS_AGAIN = 1.5
"""A layout may be so many times as far from one GPU as that is from itself."""


def compared(found: dict[str, Any], one: dict[str, Any], noise: float, asked: argparse.Namespace) -> dict[str, Any]:
    """How far it is from one GPU. `noise`: how far that may be from itself after the steps; see AS_AGAIN."""
    moved = max(1e-3, *(abs(loss - one["losses"][0]) for loss in one["losses"]))
    norm = max(abs(a - b) / b for a, b in zip(found["norms"], one["norms"], strict=True))
    loss = max(abs(a - b) for a, b in zip(found["losses"], one["losses"], strict=True)) / moved
    before, after = (float(part) for part in np.abs(found["log_probs"] - one["log_probs"]).mean(axis=1))
    within = (
        norm <= asked.norm_tolerance
        and loss <= asked.loss_tolerance
        and before <= asked.log_prob_tolerance
        and after <= max(asked.log_prob_tolerance, noise)
        and math.isfinite(before + after)
    )
    named = {"norm": norm, "loss": loss, "log_prob_before": before, "log_prob_after": after}
    apart = {name: float(f"{value:.2g}") for name, value in named.items()}
    return {"apart": apart, "within_tolerance": within}


def run_all(asked: argparse.Namespace) -> bool:
    """Whether all are as on one GPU."""
    cases = LAYOUTS[asked.backend]
    requested = asked.layouts.split(",") if asked.layouts else list(cases)
    if unknown := set(requested) - set(cases):
        raise SystemExit(f"--layouts: no {', '.join(sorted(unknown))}; there is {', '.join(cases)}")
    kinds = {cases[name].experts for name in requested}
    before = [name for name, case in cases.items() if case.alone and not case.backwards and case.experts in kinds]
    requested = before + [name for name in requested if name not in before]
    alone: dict[bool, dict[str, Any]] = {}
    noise: dict[bool, float] = {}
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as parent:
        models: dict[str, Path] = {}
        for name in requested:
            case = cases[name]
            shape = asked.moe_shape if case.experts else asked.shape
            if shape not in models:
                models[shape] = Path(parent) / shape
                write_model(models[shape], shape, asked.device)
                if asked.device == "cuda":
                    torch.cuda.empty_cache()
            result = run_layout(name, case, models[shape], shape, asked)
            if name in before and "error" not in result:
                alone[case.experts] = result
            if "error" not in result and case.experts in alone:
                if case.backwards:
                    result |= compared(result, alone[case.experts], math.inf, asked)
                    noise[case.experts] = AS_AGAIN * result["apart"]["log_prob_after"]
                else:
                    result |= compared(result, alone[case.experts], noise.get(case.experts, 0.0), asked)
            found.append(result)
            shown = {key: value for key, value in result.items() if key not in ("log_probs", "losses", "norms")}
            print(json.dumps(shown), flush=True)
    print_table(found)
    return all(result.get("within_tolerance", False) for result in found)


def print_table(found: list[dict[str, Any]]) -> None:
    print("\n| layout | shape | losses | gradient norms | apart: norm, loss, log-probs | tok/s/GPU | mfu | peak GiB |")
    print("|---|---|---|---|---|---:|---:|---:|")
    for result in found:
        if "error" in result:
            print(f"| {result['layout']} | {result['shape']} | {result['error']} | | | | | |")
            continue
        losses, norms = (" ".join(f"{value:.5f}" for value in result[key]) for key in ("losses", "norms"))
        apart = ", ".join(f"{value:.2g}" for value in result.get("apart", {}).values()) or "nothing to compare with"
        verdict = apart if result.get("within_tolerance") else f"**{apart}**"
        print(
            f"| {result['layout']} | {result['shape']} | {losses} | {norms} | {verdict} | "
            f"{result['tok_per_s_per_gpu']:,} | {result['mfu']} | {result['peak_gib']} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=LAYOUTS, default="megatron")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layouts", help="names with commas; by default all of the backend")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--moe-shape", choices=SHAPES, default="small-moe")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--options", type=json.loads, default={}, help="of the backend in every layout, as JSON")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--micros", type=int, default=4, help="micro-batches of a step, over all ranks")
    add_sequences(parser)
    parser.add_argument("--profile", action="store_true", help="profile one more step on the first rank")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--parity-steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2, help="more steps that are not timed")
    parser.add_argument("--steps", type=int, default=5, help="steps that are")
    parser.add_argument("--norm-tolerance", type=float, default=0.02)
    parser.add_argument("--loss-tolerance", type=float, default=0.05)
    parser.add_argument("--log-prob-tolerance", type=float, default=0.03)
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds that a layout gets")
    parser.add_argument("--spec", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.spec is not None:
        try:
            run_rank(asked, asked.spec)
        except Exception:  # noqa: BLE001 - every error is reported in the rank's log
            # Leaving in the usual way would wait for the other ranks.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    elif not run_all(asked):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
