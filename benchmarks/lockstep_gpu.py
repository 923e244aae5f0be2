"""Step time of `slime run` over several ranks that wait for each other, with responses of very different lengths.

    python benchmarks/lockstep_gpu.py --ranks 2
    python benchmarks/lockstep_gpu.py --ranks 2 --side before=/tmp/old:/tmp/site --side after=/tmp/site --rounds 2
    python benchmarks/lockstep_gpu.py --ranks 2 --device cpu --shape tiny --prompts 8 --median 60 --longest 200 --tokens 400

Steps come from a dump of random tokens, so that no engine is started: prompts of 64 tokens, eight responses each, lengths
log-normal with --median and --sigma, cut at --longest. Launcher `ray`, one role on --ranks devices. With --side several
versions of slime take turns, each found on its own PYTHONPATH. The first step of each run is warm-up. Prints a JSON line for
each run: seconds of training and of each step, and tokens per second and rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rollout_gpu import toml
from step_table import steps_of
from train_gpu import SHAPES, write_model

from slime_core.data.table import dump_file, write_groups
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, VersionSpan
from slime_models.new_model import ModelSizes, new_model

SAMPLES = 8
PROMPT_TOKENS = 64
SLIME = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]


def dump(folder: Path, asked: argparse.Namespace) -> None:
    """The groups of each step."""
    draw = np.random.default_rng(0)
    vocab = SHAPES[asked.shape]["vocab_size"]
    for step in range(asked.steps):
        groups = []
        for group in range(step * asked.prompts, (step + 1) * asked.prompts):
            prompt = Prompt(
                group_index=group, text="", token_ids=draw.integers(vocab, size=PROMPT_TOKENS, dtype=np.int32)
            )
            groups.append(
                SampleGroup(
                    prompt=prompt,
                    samples=tuple(sample(prompt, group * SAMPLES + n, draw, asked, vocab) for n in range(SAMPLES)),
                )
            )
        write_groups(dump_file(folder, step), groups)


def sample(prompt: Prompt, index: int, draw: np.random.Generator, asked: argparse.Namespace, vocab: int) -> Sample:
    length = int(np.clip(draw.lognormal(np.log(asked.median), asked.sigma), 1, asked.longest))
    return Sample(
        index=index,
        group_index=prompt.group_index,
        rollout_id=index,
        prompt=prompt,
        tokens=np.concatenate([prompt.token_ids, draw.integers(vocab, size=length, dtype=np.int32)]),
        prompt_length=PROMPT_TOKENS,
        loss_mask=np.ones(length, np.uint8),
        rollout_log_probs=np.full(length, -10.0, np.float32),
        spans=(VersionSpan(0, 0, length),),
        reward=float(draw.random()),
    )


def run_file(asked: argparse.Namespace, folder: Path) -> str:
    return f"""
name = "lockstep"
seed = 0
backend = {toml(asked.backend)}
engine = "local"
reward = "math"
algo = {{ name = "grpo", use_rollout_logprobs = true }}
launcher = {{ name = "ray", device = "{asked.device}", actor_num_gpus_per_node = {asked.ranks} }}
[model]
hf_checkpoint = "{folder}/model"
[data]
prompt_data = "{folder}/prompts.jsonl"
[rollout]
collector = {{ name = "replay", folder = "{folder}/dump" }}
rollout_batch_size = {asked.prompts}
n_samples_per_prompt = {SAMPLES}
rollout_max_response_len = {asked.longest}
[train]
num_rollout = {asked.steps}
num_steps_per_rollout = 1
lr = 1e-6
max_tokens_per_gpu = {asked.tokens}
[checkpoint]
save_hf = false
"""


def run(asked: argparse.Namespace, run_toml: Path, runs: Path, packages: str) -> list[dict[str, float]]:
    """Metrics of each step. The run is killed when it has them: its last checkpoint takes minutes."""
    environment = os.environ | ({"PYTHONPATH": packages} if packages else {})
    command = [*SLIME, "run", str(run_toml), "--runs-dir", str(runs)]
    with subprocess.Popen(command, stdout=sys.stderr, env=environment, start_new_session=True) as started:
        try:
            while started.poll() is None and len(steps_of(runs / "lockstep")) < asked.steps:
                time.sleep(0.2)
        finally:
            ended = started.poll()
            if ended is None:
                os.killpg(started.pid, signal.SIGTERM)
                time.sleep(3)
                if started.poll() is None:
                    os.killpg(started.pid, signal.SIGKILL)
    if ended:
        raise subprocess.CalledProcessError(ended, command)
    return steps_of(runs / "lockstep")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=32, help="a step; eight responses each")
    parser.add_argument("--median", type=float, default=700, help="of the lengths of responses")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithms of their lengths")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8448, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", action="append", default=[], help="NAME=PYTHONPATH; several take turns")
    parser.add_argument("--backend", type=json.loads, default={"name": "fsdp"}, help="with its options, as JSON")
    asked = parser.parse_args()
    sides: dict[str, str] = dict(side.split("=", 1) for side in asked.side) or {"slime": ""}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        new_model(
            folder / "model",
            "qwen3",
            ModelSizes(hidden_size=16, num_layers=1, num_heads=2),
            alphabet=string.ascii_lowercase,
        )
        write_model(folder / "model", asked.shape, asked.device)
        (folder / "prompts.jsonl").write_text('{"input": "a"}\n')
        (folder / "dump").mkdir()
        dump(folder / "dump", asked)
        (folder / "run.toml").write_text(run_file(asked, folder))
        for number in range(asked.rounds):
            for side, packages in sides.items():
                steps = run(asked, folder / "run.toml", folder / f"runs-{side}-{number}", packages)[1:]
                print(json.dumps(figures(asked, side, steps)), flush=True)


def figures(asked: argparse.Namespace, side: str, steps: list[dict[str, float]]) -> dict[str, Any]:
    trained = [step["perf/actor_train_time"] for step in steps]
    tokens = [step["perf/train_tokens"] for step in steps]
    return {
        "side": side,
        "ranks": asked.ranks,
        "train_s": [round(seconds, 2) for seconds in trained],
        "step_s": [round(step["perf/step_time"], 2) for step in steps],
        "train_tokens": [int(number) for number in tokens],
        "tok_s_rank": round(statistics.median(t / s for t, s in zip(tokens, trained, strict=True)) / asked.ranks),
    }


if __name__ == "__main__":
    main()
