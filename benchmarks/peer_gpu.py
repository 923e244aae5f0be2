"""`slime run` beside verl or TRL on one GPU: rollout, training, weight update and whole step, in turns in one call.

    python benchmarks/peer_gpu.py --peer verl --peer-path verl-packages      # made by verl_bundle/build.sh
    python benchmarks/peer_gpu.py --peer verl --shape qwen3-4b --state-dtype bf16 --rounds 1 --steps 3
    python benchmarks/peer_gpu.py --peer trl --requests 128 --new-tokens 128
    python benchmarks/peer_gpu.py --peer verl --device cpu --shape tiny --requests 16 --new-tokens 8 --prompt-tokens 8 ...

Both sides get the same random model, prompts, number and length of responses (the model has no end token), one optimizer
step of AdamW on a rollout batch of GRPO, tokens of a micro-batch, recomputation, dtypes of weights and moments, and
SGLang with the same options. Old log-probs are the engine's on both sides. Engines give their memory back while training, and
trainers theirs while sampling unless --no-offload.
--rounds alternates the sides, each a process of its own; the first step of each, which warms up, is not counted.

    rollout   from the first request until all responses are there: tokens of responses a second
    train     forward, backward and optimizer step: tokens of prompts and responses a second
    weights   seconds of the weight update; verl's includes waking the engine and offloading the trainer
    other     the step without rollout and training: weights, sleep and wake-up of both, rewards, advantages
    step      by the clock, from the end of a step to the end of the next: tokens of prompts and responses a second
    GiB       most that nvidia-smi counted on the GPU in the whole run, and what the trainer's own torch allocated

A step ends when its metrics are written; this script looks twenty times a second. slime's rollout_s, train_s and logged_s are
perf/rollout_time, perf/actor_train_time and perf/step_time; verl's are timing_s/gen, timing_s/update_actor and
timing_s/step. --slime-backend '{"attn_implementation": "sdpa"}' gives slime verl's attention
without flash_attn. One JSON line a step, at the end a table of medians.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import peer_trl
import peer_verl
import psutil
import rollout_gpu
from rollout_gpu import SAMPLES, SHAPES
from step_table import steps_of

PEERS: dict[str, ModuleType] = {"verl": peer_verl, "trl": peer_trl}
ENGINE = {
    "mem_fraction_static": 0.6,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    # Capturing the prefill takes 80 s of a start, for prompts of 64 tokens.
    "disable_prefill_cuda_graph": True,
}
STORED = {"fp32": "fp32", "bf16": "bf16"}
COLUMNS = ("rollout_tok_s", "train_tok_s", "step_tok_s", "rollout_s", "train_s", "weights_s", "other_s", "step_s")


def main() -> None:
    asked = parsed()
    found: dict[str, list[dict[str, float]]] = {"slime": [], asked.peer: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rollout_gpu.write_model(folder / "model", asked)
        prompts = rollout_gpu.prompts_of(asked)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        PEERS[asked.peer].write_data(folder, prompts)
        for number in range(asked.rounds):
            for side in asked.sides.split(","):
                rows = run_slime(asked, folder) if side == "slime" else run_peer(asked, folder)
                for step, row in enumerate(rows):
                    shown = {key: round(value, 4) for key, value in row.items()}
                    print(json.dumps({"side": side, "round": number, "step": step, **shown}), flush=True)
                found[side] += rows[asked.warmup :]
    print_table(found, asked)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, default="verl")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peer")
    parser.add_argument("--peer-path", type=Path, help="folder of the peer's packages, before all others for it alone")
    parser.add_argument("--sides", default="", help="by default slime,PEER; one of them alone, or in the other order")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--requests", type=int, default=256, help="a step; eight for each prompt")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--train-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=4, help="of each process")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those that count")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each side, in turn")
    parser.add_argument("--state-dtype", choices=STORED, default="fp32", help="of weights and moments while training")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.999))
    parser.add_argument("--no-recompute", dest="recompute", action="store_false", help="keep all activations")
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="further options of SGLang on both sides, as JSON"
    )
    parser.add_argument("--slime-backend", type=json.loads, default={}, help="further options of slime-fsdp, as JSON")
    parser.add_argument(
        "--no-offload",
        dest="offload",
        action="store_false",
        help="trainers stay on the GPU while responses are sampled",
    )
    parser.add_argument(
        "--verl-log-probs", choices=("triton", "torch", "liger", "plain"), default="triton", help="verl's fused kernel"
    )
    parser.add_argument("--verl-workers", type=int, default=4, help="verl's processes of agent loops, and of rewards")
    parser.add_argument("--verl", action="append", default=[], metavar="KEY=VALUE", help="a further override of verl")
    parser.add_argument("--trl", type=json.loads, default={}, help="further options of TRL's GRPOConfig, as JSON")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=570.0, help="seconds that a process may take")
    parser.add_argument("--keep", type=Path, help="folder for what each process printed; by default shown on failure")
    asked = parser.parse_args()
    asked.sides = asked.sides or f"slime,{asked.peer}"
    if unknown := set(asked.sides.split(",")) - {"slime", asked.peer}:
        parser.error(f"--sides: no {', '.join(sorted(unknown))}; there is slime, {asked.peer}")
    asked.engine = ENGINE | asked.engine
    # Runs have a working folder of their own; an interpreter of an environment is a link that must stay one.
    asked.peer_python = os.path.abspath(shutil.which(asked.peer_python) or asked.peer_python)
    asked.keep = asked.keep and asked.keep.resolve()
    return asked


def run_slime(asked: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    (folder / "even.py").write_text(rollout_gpu.REWARD)
    (folder / "run.toml").write_text(run_file(asked, folder))
    run_dir = folder / "runs" / "rollout"
    words = ["slime", "run", "--fresh", str(folder / "run.toml")]
    with most_memory(asked) as most:
        ends = run(asked, folder, "slime", words, {}, lambda: len(steps_of(run_dir)))
    rows = [slime_row(step, asked.requests) | most for step in steps_of(run_dir)]
    return by_clock(rows, ends)


def run_file(asked: argparse.Namespace, folder: Path) -> str:
    dtypes = dict.fromkeys(("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), STORED[asked.state_dtype])
    backend = {"name": "fsdp", "gradient_checkpointing": asked.recompute, **dtypes, **asked.slime_backend}
    names = vars(asked) | {
        # One more than is counted: the last step of a run writes its checkpoint, here it is killed before.
        "steps": asked.steps + 1,
        "backend": backend,
        "engine": {"name": "sglang", "deterministic": False, **asked.engine},
        "placement": "colocated",
        "gpus": 1,
        "routing_replay": False,
        "mismatch": False,
        "transport": None,
    }
    text = rollout_gpu.run_file(argparse.Namespace(**names), folder / "runs")
    first, second = asked.betas
    optimizer = f"weight_decay = {asked.weight_decay}\nadam_beta1 = {first}\nadam_beta2 = {second}\n"
    kept = "" if asked.offload else ", offload_train = false"
    return text.replace("lr = 1e-6\n", f"lr = {asked.lr}\n{optimizer}").replace(
        "colocate = true", f"colocate = true{kept}"
    )


def slime_row(step: Mapping[str, float], samples: int) -> dict[str, float]:
    return {
        "logged_s": step["perf/step_time"],
        "rollout_s": step["perf/rollout_time"],
        "train_s": step["perf/actor_train_time"],
        # The first weights belong to the start, not to a step.
        "weights_s": step.get("perf/update_weights_time", 0.0),
        "response_tokens": step["rollout/response_len/mean"] * samples,
        "tokens": step["perf/train_tokens"],
        **{
            f"{name}_s": step.get(f"perf/{name}_time", 0.0)
            for name in ("sleep", "wake_up", "engine_sleep", "engine_wake_up", "sync")
        },
    }


def run_peer(asked: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    peer = PEERS[asked.peer]
    added = peer.environment(asked, folder)
    paths = [
        *([asked.peer_path.resolve()] if asked.peer_path else []),
        *peer.PYTHON_PATH,
        os.environ.get("PYTHONPATH", ""),
    ]
    added["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, paths)))
    (folder / f"{asked.peer}.jsonl").unlink(missing_ok=True)
    with most_memory(asked) as most:
        words = peer.command(asked, folder, SAMPLES)
        ends = run(asked, folder, asked.peer, words, added, lambda: len(peer.steps_of(folder)))
    return by_clock([peer.row(step, asked.requests) | most for step in peer.steps_of(folder)], ends)


def by_clock(rows: list[dict[str, float]], ends: list[float]) -> list[dict[str, float]]:
    """With seconds of whole steps; the first one's are those since the command."""
    return [speeds(row | {"step_s": after - before}) for row, before, after in zip(rows, ends, ends[1:], strict=False)]


def run(
    asked: argparse.Namespace,
    folder: Path,
    side: str,
    words: list[str],
    added: dict[str, str],
    done: Callable[[], int],
) -> list[float]:
    """Runs it until `done()` counts all steps, and ends its processes: no checkpoint. Returns when it began and when each
    step ended, in seconds. Raises RuntimeError if it ends before there is a step that counts."""
    path = (asked.keep or folder) / f"{side}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    times = [time.monotonic()]
    with path.open("ab") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=log, cwd=folder, env=os.environ | added, start_new_session=True
        )
        try:
            while len(times) <= asked.steps and process.poll() is None and time.monotonic() < times[0] + asked.timeout:
                time.sleep(0.05)
                times += [time.monotonic()] * (done() + 1 - len(times))
            times += [time.monotonic()] * (done() + 1 - len(times))
        finally:
            end(process)
    if len(times) <= asked.steps:
        print(path.read_text(errors="replace")[-20000:], file=sys.stderr)
        message = (
            f"{side} ended with {len(times) - 1} of {asked.steps} steps, exit code {process.returncode}; see above"
        )
        if len(times) <= asked.warmup + 1:
            raise RuntimeError(message)
        print(message, file=sys.stderr)
    return times


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills its session, and what started sessions of their own: Ray's processes and servers."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def most_memory(asked: argparse.Namespace) -> Iterator[dict[str, float]]:
    """The mapping has the most GiB that the GPU had in use, twice a second, at the end of the block."""
    most: dict[str, float] = {}
    if asked.device == "cpu":
        yield most
        return
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
    with tempfile.TemporaryFile() as file, subprocess.Popen(query, stdout=file) as watch:
        try:
            yield most
        finally:
            watch.terminate()
            file.seek(0)
            most["gpu_gib"] = max((float(word) for word in file.read().split()), default=0.0) / 1024


def speeds(row: dict[str, float]) -> dict[str, float]:
    return row | {
        "other_s": row["step_s"] - row["rollout_s"] - row["train_s"],
        "rollout_tok_s": row["response_tokens"] / row["rollout_s"],
        "train_tok_s": row["tokens"] / row["train_s"],
        "step_tok_s": row["tokens"] / row["step_s"],
    }


def print_table(found: Mapping[str, list[dict[str, float]]], asked: argparse.Namespace) -> None:
    print(f"\n| side | {' | '.join(COLUMNS)} | GPU GiB | trainer GiB | response tokens |")
    print("|---" * (len(COLUMNS) + 4) + "|")
    for side, rows in found.items():
        if rows:
            cells = [f"{statistics.median(row[name] for row in rows):,.{digits(name)}f}" for name in COLUMNS]
            cells += [f"{max(row.get(name, 0.0) for row in rows):.1f}" for name in ("gpu_gib", "trainer_gib")]
            print(f"| {side} {version(side, asked)} | {' | '.join(cells)} | {rows[-1]['response_tokens']:,.0f} |")


def digits(name: str) -> int:
    return 0 if name.endswith("tok_s") else 3


def version(side: str, asked: argparse.Namespace) -> str:
    """Of the side's distribution, as its processes find it."""
    path = [str(asked.peer_path)] if asked.peer_path and side != "slime" else []
    name = "slime-rl" if side == "slime" else side
    return next((found.version for found in importlib.metadata.distributions(name=name, path=path + sys.path)), "")


if __name__ == "__main__":
    main()
