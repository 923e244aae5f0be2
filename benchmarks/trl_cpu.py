"""The demo's GRPO step on CPU: `slime run examples/arithmetic/run.toml` against TRL's GRPOTrainer.

Both train the same model on the same prompts with the same reward, batch, number of optimizer steps per rollout batch,
response limit, clipping, optimizer, threads and float32. TRL's settings are read from the run file as slime resolved it. The
sides alternate, each in its own process; the first batches of each are warm-up and do not count.

Seconds of a rollout batch:
  slime   perf/step_time (updating the weights that it samples with, sampling, rewards, scoring, optimizer steps), from the
          run's metrics.jsonl
  TRL     from the end of the last optimizer step of one batch to that of the next, by a callback (trl_grpo.py)
Tokens of a rollout batch, without padding:
  sampled   slime: rollout/response_len/mean x samples; TRL: completions/mean_length x samples; both with the end token
  trained   prompt and response tokens of one forward and backward; slime: perf/train_tokens; TRL: growth of
            num_tokens
Tokens per second are (sampled + trained) / seconds.

One difference remains, because each side is used in its usual way: with use_rollout_logprobs in the run file, slime takes
the old log-probs from its engine; TRL computes them again. With `--scored` slime computes them too.

`--floor`: a third process in each round makes the same step in bare torch, without what a trainer does beside it
(cpu_floor.py), and a fourth one what responses cost in Python at least if each is a coroutine and its reward is computed in
another process (response_floor.py). TRL's seconds over those of both bound what any trainer of that kind can reach.

    python benchmarks/trl_cpu.py                          # the demo's own batch
    python benchmarks/trl_cpu.py --prompts 64 --steps 3 --rounds 1
    python benchmarks/trl_cpu.py --record                 # on a quiet machine: appends to RESULTS.md
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RUN_FILE = HERE.parent / "examples" / "arithmetic" / "run.toml"
RESULTS = HERE / "RESULTS.md"
SAME_NAME = ("lr", "min_lr", "lr_warmup_iters", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad")
"""Keys of the train table that trl_grpo.py uses unchanged."""
TRL_SPEAKS: dict[str, dict[str, object]] = {
    "algo": {"name": "grpo", "aggregation": "seq_mean", "use_kl_loss": False, "kl_coef": 0.0, "entropy_coef": 0.0},
    "rollout": {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "filters": []},
    "train": {"optimizer": "adam", "lr_decay_style": "linear"},
}
"""Values of the run file that trl_grpo.py requires."""
LIBRARIES = ("slime-rl", "trl", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One generation and the optimizer steps on it."""

    seconds: float
    sampled: int
    """Tokens that the model wrote."""
    trained: int
    """Tokens in forward and backward."""
    reward: float = math.nan
    """Mean of the samples."""
    cpu_seconds: float = math.nan
    """Of the process; not measured for slime."""
    sampling_seconds: float = math.nan
    """Part of `seconds`; for the floor."""

    @property
    def tokens_per_s(self) -> float:
        return (self.sampled + self.trained) / self.seconds


@dataclass(frozen=True, slots=True)
class Round:
    """The measurements of one process of each side, after warm-up."""

    slime: tuple[RolloutBatch, ...]
    trl: tuple[RolloutBatch, ...]
    floor: tuple[RolloutBatch, ...] = ()
    responses: tuple[float, ...] = ()
    """Seconds of a batch's responses in Python, at least."""


def run_slime(folder: Path, asked: argparse.Namespace) -> tuple[Path, list[RolloutBatch]]:
    """`slime run`; its run folder and its batches."""
    flags = ["--runs-dir", str(folder), "--name", "slime", "--num-rollout", str(asked.steps + asked.warmup)]
    # Evaluation is outside of what is timed; without it the rounds are closer in time.
    flags += ["--set", "eval.datasets={}", "--trackers", "jsonl", "--quiet"]
    if asked.scored:
        flags += ["--set", "algo.use_rollout_logprobs=false"]
    if asked.prompts is not None:
        flags += ["--rollout-batch-size", str(asked.prompts)]
    run_process([str(Path(sys.executable).with_name("slime")), "run", str(RUN_FILE), *flags], asked.threads)
    run_dir = folder / "slime"
    rollout = config_of(run_dir)["rollout"]
    samples = rollout["rollout_batch_size"] * rollout["n_samples_per_prompt"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["axis"] == "rollout/step"]
    return run_dir, [
        RolloutBatch(
            seconds=step["perf/step_time"],
            sampled=round(step["rollout/response_len/mean"] * samples),
            trained=round(step["perf/train_tokens"]),
            reward=step["rollout/raw_reward"],
        )
        for step in steps
    ]


def run_trl(folder: Path, run_dir: Path, asked: argparse.Namespace) -> list[RolloutBatch]:
    """TRL with the settings of the slime run in `run_dir`."""
    settings, result = folder / "trl.json", folder / "trl-result.json"
    settings.write_text(json.dumps(trl_settings(config_of(run_dir), asked)))
    run_process([sys.executable, str(HERE / "trl_grpo.py"), str(settings), str(result)], asked.threads)
    measured = json.loads(result.read_text())
    assert measured["threads"] == asked.threads, measured["threads"]
    return [RolloutBatch(**batch) for batch in measured["batches"]]


def run_floor(
    folder: Path, run_dir: Path, slime: Sequence[RolloutBatch], asked: argparse.Namespace
) -> list[RolloutBatch]:
    """The arithmetic of as many tokens as slime sampled, alone."""
    settings, result = folder / "floor.json", folder / "floor-result.json"
    values = trl_settings(config_of(run_dir), asked)
    samples = values["prompts"] * values["samples_per_prompt"]
    values["response_tokens"] = round(mean(batch.sampled for batch in slime) / samples)
    settings.write_text(json.dumps(values))
    run_process([sys.executable, str(HERE / "cpu_floor.py"), str(settings), str(result)], asked.threads)
    return [RolloutBatch(**batch) for batch in json.loads(result.read_text())["batches"]]


def run_responses(folder: Path, run_dir: Path, asked: argparse.Namespace) -> list[float]:
    """Seconds of as many responses as slime had."""
    result, rollout = folder / "responses.json", config_of(run_dir)["rollout"]
    samples = rollout["rollout_batch_size"] * rollout["n_samples_per_prompt"]
    script = [sys.executable, str(HERE / "response_floor.py"), "--responses", str(samples)]
    run_process([*script, "--result", str(result)], asked.threads)
    seconds: list[float] = json.loads(result.read_text())
    return seconds


def config_of(run_dir: Path) -> dict[str, Any]:
    """The run file as slime resolved it."""
    return tomllib.loads((run_dir / "config.toml").read_text())


def trl_settings(config: dict[str, Any], asked: argparse.Namespace) -> dict[str, Any]:
    """The settings for trl_grpo.py."""
    rollout, train, algo = config["rollout"], config["train"], config["algo"]
    for table, requested in TRL_SPEAKS.items():
        found = {key: config[table][key] for key in requested}
        if found != requested:
            sys.exit(f"{RUN_FILE}: {table} has {found}; trl_grpo.py knows {requested} only.")
    (data,) = config["data"]["prompt_data"]
    samples = rollout["rollout_batch_size"] * rollout["n_samples_per_prompt"]
    return {
        "hf_checkpoint": config["model"]["hf_checkpoint"],
        "prompt_data": data["path"],
        "input_key": config["data"]["input_key"],
        "label_key": config["data"]["label_key"],
        "seed": config["seed"],
        "prompts": rollout["rollout_batch_size"],
        "samples_per_prompt": rollout["n_samples_per_prompt"],
        "max_response_len": rollout["rollout_max_response_len"],
        "steps_per_batch": samples // train["global_batch_size"],
        "micro_batches_per_step": asked.trl_micro_batches,
        "batches": asked.steps + asked.warmup,
        "eps_clip": algo["loss"]["eps_clip"],
        "eps_clip_high": algo["loss"]["eps_clip_high"],
        "threads": asked.threads,
        **{name: train[name] for name in SAME_NAME},
    }


def run_process(command: Sequence[str], threads: int) -> None:
    """Runs it to its end; what it printed is shown only if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{shlex.join(command)}: exit code {done.returncode}")


def measure(asked: argparse.Namespace, console: Console) -> list[Round]:
    rounds = []
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run_dir, slime = run_slime(folder, asked)
            trl = run_trl(folder, run_dir, asked)
            floor = run_floor(folder, run_dir, slime, asked) if asked.floor else []
            responses = run_responses(folder, run_dir, asked) if asked.floor else []
        batches = (tuple(side[asked.warmup :]) for side in (slime, trl, floor))
        rounds.append(Round(*batches, responses=tuple(responses)))
        console.print(
            f"round {number + 1}: slime {speed(rounds[-1].slime):,.0f}, TRL {speed(rounds[-1].trl):,.0f} tokens/s"
        )
    return rounds


def speed(batches: Sequence[RolloutBatch]) -> float:
    return median(batch.tokens_per_s for batch in batches)


def rows_of(rounds: Sequence[Round]) -> list[list[str]]:
    """The table: a header, then a row for each side."""
    sides = {
        "slime": [batch for one in rounds for batch in one.slime],
        "TRL": [batch for one in rounds for batch in one.trl],
    }
    if rounds[0].floor:
        sides["floor"] = [batch for one in rounds for batch in one.floor]
    rows = [["min / median / max", "seconds a batch", "tokens/s", "sampled", "trained", "reward"]]
    for side, batches in sides.items():
        seconds = [batch.seconds for batch in batches]
        speeds = [batch.tokens_per_s for batch in batches]
        rows.append(
            [
                side,
                " / ".join(f"{number:.3f}" for number in (min(seconds), median(seconds), max(seconds))),
                " / ".join(f"{number:,.0f}" for number in (min(speeds), median(speeds), max(speeds))),
                f"{mean(batch.sampled for batch in batches):,.0f}",
                f"{mean(batch.trained for batch in batches):,.0f}",
                f"{mean(batch.reward for batch in batches):.3f}",
            ]
        )
    return rows


def ratios_of(rounds: Sequence[Round]) -> str:
    slime = speed([batch for one in rounds for batch in one.slime])
    trl = speed([batch for one in rounds for batch in one.trl])
    pairs = ", ".join(f"{speed(one.slime) / speed(one.trl):.2f}" for one in rounds)
    found = f"tokens/s, slime / TRL: {slime / trl:.2f} (medians of all batches); round by round {pairs}"
    if not rounds[0].floor:
        return found
    bare = [batch for one in rounds for batch in one.floor]
    used = median(batch.cpu_seconds for one in rounds for batch in one.trl) / median(b.cpu_seconds for b in bare)
    handled = median(seconds for one in rounds for seconds in one.responses)
    least = median(batch.seconds for batch in bare) + handled
    with_responses = median(batch.seconds for one in rounds for batch in one.trl) / least
    return (
        f"{found}; floor / TRL: {speed(bare) / trl:.2f}, by seconds of the processor {used:.2f}, with responses "
        f"({handled:.3f} s a batch) {with_responses:.2f}"
    )


def cpu_model() -> str:
    names = [line.split(":", 1)[1].strip() for line in cpu_info() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def conditions(asked: argparse.Namespace) -> str:
    """Machine and versions, one line."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    return (
        f"{available_cores()} cores of {cpu_model()}; torch threads: {asked.threads}; Python {platform.python_version()}, "
        f"{versions}"
    )


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def record(rounds: Sequence[Round], asked: argparse.Namespace) -> None:
    """Appends a dated entry to RESULTS.md."""
    header, *rows = rows_of(rounds)
    words = [word for word in sys.argv[1:] if word != "--record"]
    lines = [
        f"\n## {datetime.datetime.now(datetime.UTC):%Y-%m-%d}: GRPO step on CPU, slime and TRL",
        "",
        f"`{shlex.join(['python', 'benchmarks/trl_cpu.py', *words])}`  ",
        f"{conditions(asked)}.",
        "",
        f"| {' | '.join(header)} |",
        "|---|" + "---:|" * (len(header) - 1),
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"{ratios_of(rounds)}.",
    ]
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def show(rounds: Sequence[Round], asked: argparse.Namespace, console: Console) -> None:
    header, *rows = rows_of(rounds)
    table = Table(box=SIMPLE, padding=(0, 1))
    for number, title in enumerate(header):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table, ratios_of(rounds), conditions(asked), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side, in turn")
    parser.add_argument("--steps", type=int, default=6, help="rollout batches that count, per process")
    parser.add_argument("--warmup", type=int, default=1, help="rollout batches before them, on both sides")
    parser.add_argument("--prompts", type=int, help="prompts a rollout batch; by default the run file's")
    parser.add_argument("--threads", type=int, default=available_cores(), help="of torch; by default one a core")
    parser.add_argument("--scored", action="store_true", help="slime: old log-probs from the trainer, as in TRL")
    parser.add_argument("--trl-micro-batches", type=int, default=1, help="TRL: micro-batches an optimizer step")
    parser.add_argument("--floor", action="store_true", help="the arithmetic of the step alone, as a third side")
    parser.add_argument("--record", action="store_true", help="append an entry to benchmarks/RESULTS.md")
    asked = parser.parse_args()
    if min(asked.rounds, asked.steps, asked.threads) < 1 or asked.warmup < 0:
        parser.error("--rounds, --steps and --threads are at least 1, --warmup at least 0")

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    rounds = measure(asked, console)
    show(rounds, asked, console)
    if asked.record:
        record(rounds, asked)


if __name__ == "__main__":
    main()
