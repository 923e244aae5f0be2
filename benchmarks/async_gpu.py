"""Speedup by asynchrony and partial rollouts on two GPUs: one trains, one generates with SGLang.

    python benchmarks/async_gpu.py --engine '{"attention_backend":"triton","sampling_backend":"pytorch"}'
    python benchmarks/async_gpu.py --device cpu --shape tiny --groups 4 --concurrency 16 --median 16 --cap 64 --steps 6

The real counterpart of simulated_rollout.py: GRPO runs of a random Qwen3 shape whose responses have forced lengths,
log-normal (--median, --sigma, --cap tokens), drawn from the response's number in the run, so that every run has the same;
a random model has no end token. --groups prompts of eight responses a step on --concurrency slots. Each case is a
`slime run` of its own: synchronous, one step ahead, three steps ahead with weights updated in
flight, and partial rollouts with twice the prompts in flight.

Seconds per step are those of waiting, training and weight updates: the mean over the steps between the first --settled and
the last AHEAD, since a run that is ahead has nothing left to generate in its last steps, which are shorter. With G (seconds
of collecting) and T (the others) of the synchronous run, and F the seconds of collecting if slots are always used, which is
with partial rollouts, asynchrony gives a speedup of at most (G + T) / max(F, T). One JSON line for each case.

--rollout-only runs the cases on one GPU without a trainer: `response_tokens` over `s_per_step` is then what the engine gives,
of the case `asynchronous` with all slots in use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rollout_gpu import REWARD, SAMPLES, SHAPES, prompts_of, toml, write_model

AHEAD = 3

FORCED = '''
import math
from dataclasses import replace
from statistics import NormalDist

import xxhash

from slime_core.plugin import generator
from slime_core.types.sample import Status


def length_of(index):
    """Tokens of a response, by its number in the run."""
    uniform = (xxhash.xxh3_64_intdigest(f"length {{index}}".encode()) + 0.5) / 2**64
    return max(1, min({cap}, round({median} * math.exp({sigma} * NormalDist().inv_cdf(uniform)))))


@generator("forced")
async def forced(episode):
    trajectory = episode.trajectory()
    left = length_of(trajectory.index) - trajectory.response_length
    if left <= 0:
        return [trajectory.finish(status=Status.TRUNCATED)]
    sampling = replace(episode.sampling, max_new_tokens=left)
    trajectory.append_completion(await episode.complete(trajectory.tokens, sampling))
    return [trajectory.finish()]
'''


def cases(asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Keys of the table `rollout`."""
    return {
        "synchronous": {},
        "one step ahead": {"max_async_level": 1},
        "asynchronous": {"max_async_level": AHEAD, "max_staleness": 8},
        "partial rollouts": {
            "partial_rollout": True,
            "over_sampling_batch_size": 2 * asked.groups,
            "max_staleness": 8,
        },
    }


def run_file(asked: argparse.Namespace, name: str, rollout: dict[str, Any]) -> str:
    keys = {
        "rollout_batch_size": asked.groups,
        "n_samples_per_prompt": SAMPLES,
        "rollout_max_response_len": asked.cap,
        "concurrency": asked.concurrency,
    }
    launcher = {"name": "ray", "device": asked.device, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
    if asked.rollout_only:
        launcher = {"name": "local", "device": asked.device}
        rollout = rollout | {"debug_rollout_only": True}
    return f"""
name = "{name.replace(" ", "-")}"
plugin = ["even.py", "forced.py"]
backend = {toml(asked.backend)}
engine = {toml({"name": "sglang", **asked.engine})}
reward = "even"
generate = "forced"
algo = {{ name = "grpo", use_rollout_logprobs = true }}
launcher = {toml(launcher)}
model = {{ hf_checkpoint = "model" }}
data = {{ prompt_data = "prompts.jsonl", input_key = "prompt" }}
rollout = {toml(keys | rollout)}
train = {{ num_rollout = {asked.steps}, num_steps_per_rollout = 1, lr = 1e-6, max_tokens_per_gpu = {asked.train_tokens} }}
checkpoint = {{ save_hf = false }}
sync = {{ transport = "distributed", update_weight_buffer_size = {2048 * 2**20} }}
eval = {{ skip_eval_before_train = true }}
"""


def run_slime(asked: argparse.Namespace, folder: Path, name: str, rollout: dict[str, Any]) -> list[dict[str, float]]:
    """Metrics of each step."""
    file = folder / "run.toml"
    file.write_text(run_file(asked, name, rollout))
    subprocess.run(["slime", "run", file.name], check=True, stdout=sys.stderr, cwd=folder)
    (metrics,) = folder.glob(f"runs/{name.replace(' ', '-')}/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["metrics"] for record in records if record["axis"] == "rollout/step"]


def mean(steps: list[dict[str, float]], *names: str) -> float:
    return statistics.mean(sum(step.get(name, 0.0) for name in names) for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--groups", type=int, default=32, help="prompts a step, with eight responses each")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--median", type=int, default=1000)
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--cap", type=int, default=8000)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--settled", type=int, default=2, help="first steps that do not count")
    parser.add_argument("--train-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--engine", type=json.loads, default={}, help="SGLang's options as JSON")
    parser.add_argument(
        "--backend", type=json.loads, default={"name": "fsdp"}, help="the backend and its options as JSON"
    )
    parser.add_argument("--rollout-only", action="store_true")
    parser.add_argument("--cases", default="", help="comma-separated; by default all")
    parser.add_argument("--keep", type=Path, help="folder of the runs, which is kept")
    asked = parser.parse_args()
    if asked.steps <= asked.settled + AHEAD:
        parser.error(f"--steps {asked.steps}: the first {asked.settled} and the last {AHEAD} do not count")
    asked.new_tokens, asked.requests = asked.cap, 2 * asked.groups * SAMPLES
    chosen = {name: keys for name, keys in cases(asked).items() if not asked.cases or name in asked.cases.split(",")}
    with contextlib.ExitStack() as stack:
        name = asked.keep or stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", asked)
        prompts = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts_of(asked))
        (folder / "prompts.jsonl").write_text(prompts)
        (folder / "even.py").write_text(REWARD)
        (folder / "forced.py").write_text(FORCED.format(cap=asked.cap, median=asked.median, sigma=asked.sigma))
        for case, keys in chosen.items():
            steps = run_slime(asked, folder, case, keys)[asked.settled : -AHEAD]
            print(
                json.dumps(
                    {
                        "case": case,
                        "s_per_step": round(mean(steps, "perf/step_time"), 3),
                        "collect_s": round(mean(steps, "perf/rollout_time"), 3),
                        "train_s": round(mean(steps, "perf/train_time"), 3),
                        "publish_s": round(mean(steps, "perf/update_weights_time"), 3),
                        "response_tokens": round(SAMPLES * asked.groups * mean(steps, "rollout/response_len/mean")),
                        "longest": max(step["rollout/response_len/max"] for step in steps),
                        "staleness": round(mean(steps, "rollout/staleness/mean"), 2),
                        "steps": [round(step["perf/step_time"], 2) for step in steps],
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
