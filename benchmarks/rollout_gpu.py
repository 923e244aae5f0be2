"""Rollout throughput of `slime run` with SGLang or vLLM on a GPU, beside the same server asked directly.

    python benchmarks/rollout_gpu.py                                   # colocated: trainer and engine on one GPU
    python benchmarks/rollout_gpu.py --placement disaggregated         # on two, weights over NCCL
    python benchmarks/rollout_gpu.py --engine '{"name": "vllm", "python": ".venv-vllm/bin/python"}' --engine '{}'  # and SGLang

A GRPO run of a random Qwen3 shape: prompts of --prompt-tokens, eight responses each, --new-tokens long (a random model hardly
ever writes its end token, which the plain server ignores). Its rollout throughput is the responses' tokens over
perf/rollout_time, which includes rewards, groups and whatever else the run does until it can train; after the first step,
which warms up. Then a plain server is started with the same options and gets the same requests at the same concurrency from a
bare HTTP client, as often; and SGLang's then once more through slime-router in front of it; unless --run-only. One JSON line
for each engine, one after the other with the same model, prompts and run file. Before it a table of every step and of the
start, by part (benchmarks/step_table.py). --keep FOLDER keeps model, runs and caches there: the same command once more is a
second start on the same machine.

    python benchmarks/rollout_gpu.py --in-flight 64,128,256,512,1024   # tokens/s by the number of requests in flight

One run that only generates, then the plain server, each started once; every number of requests at once to both, --rounds times
after a first round that is not counted (once for the smallest number only).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import torch
from plain_servers import PROGRAMS, PlainServer
from step_table import differences, steps_of, table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import slime_core
from slime_models.new_model import ModelSizes, new_model

ALPHABET = string.ascii_lowercase
SAMPLES = 8
TIMES = ("rollout", "step", "train", "update_weights", "sleep", "wake_up", "engine_sleep", "engine_wake_up")
START_S = 300.0
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128} | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "qwen3-4b": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
    # SGLang's mixtures of experts always have a head of their own.
    "qwen3-moe-3b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 6144}
    | {"num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1024}
    | {"norm_topk_prob": True, "tie_word_embeddings": False},
    "tiny": TINY,
    "tiny-moe": TINY
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    | {"tie_word_embeddings": False},
}
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
REWARD = '''
from slime_core.plugin import reward


@reward("even")
def even(sample):
    """Something that differs between the responses of a prompt."""
    return float(sample.tokens[-1] % 2)
'''


def write_model(folder: Path, asked: argparse.Namespace) -> None:
    """A small model's tokenizer over a model of the shape: ids beyond the tokenizer's have no text."""
    kind = "qwen3_moe" if "num_experts" in SHAPES[asked.shape] else "qwen3"
    # verl asks Qwen's tokenizers for this token.
    sizes, tokens = ModelSizes(hidden_size=16, num_layers=1, num_heads=2), ("<|im_end|>",)
    new_model(folder, kind, sizes, alphabet=ALPHABET, tokens=tokens)
    config = AutoConfig.from_pretrained(folder)
    for name, value in (COMMON | SHAPES[asked.shape]).items():
        setattr(config, name, value)
    config.max_position_embeddings = asked.prompt_tokens + asked.new_tokens + 64
    # The configuration made one entry for each layer of the small model.
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.eos_token_id = None
    torch.manual_seed(0)
    with torch.device(asked.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    del model
    if asked.device == "cuda":
        # This process keeps nothing on the GPU that it measures.
        torch.cuda.empty_cache()


def prompts_of(asked: argparse.Namespace) -> list[str]:
    letters = random.Random(0)
    number = asked.steps * asked.requests // SAMPLES
    return ["".join(letters.choices(ALPHABET, k=asked.prompt_tokens)) for _ in range(number)]


def run_file(asked: argparse.Namespace, runs: Path) -> str:
    colocated = asked.placement == "colocated"
    places = f"actor_num_gpus_per_node = {asked.gpus}, rollout_num_gpus = {asked.gpus}"
    if colocated and asked.gpus == 1:
        launcher = f'{{ name = "local", device = "{asked.device}", colocate = true }}'
    else:
        shared = ", colocate = true" if colocated else ""
        launcher = f'{{ name = "ray", device = "{asked.device}", {places}{shared} }}'
    return f"""
name = "rollout"
seed = 0
plugin = ["even.py"]
backend = {toml(asked.backend)}
engine = {toml(asked.engine)}
reward = "even"
algo = {{ name = "grpo", use_rollout_logprobs = true, get_mismatch_metrics = {json.dumps(asked.mismatch)} }}
launcher = {launcher}
runs_dir = "{runs}"
[model]
hf_checkpoint = "model"
[data]
prompt_data = "prompts.jsonl"
input_key = "prompt"
[rollout]
rollout_batch_size = {asked.requests // SAMPLES}
n_samples_per_prompt = {SAMPLES}
rollout_max_response_len = {asked.new_tokens}
concurrency = {asked.concurrency}
dump_rollouts = false
[train]
num_rollout = {asked.steps}
num_steps_per_rollout = 1
lr = 1e-6
max_tokens_per_gpu = {asked.train_tokens}
use_rollout_routing_replay = {json.dumps(asked.routing_replay)}
[sync]
transport = "{asked.transport or ("ipc" if colocated else "distributed")}"
update_weight_buffer_size = {2048 * 2**20}
[checkpoint]
save_hf = false
[eval]
skip_eval_before_train = true
"""


def toml(values: dict[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"


def run_slime(asked: argparse.Namespace, folder: Path, runs: str) -> list[dict[str, float]]:
    """Metrics of each step. With --end-early the run is killed when it has them: no checkpoint. runs: its runs folder."""
    (folder / "even.py").write_text(REWARD)
    (folder / "run.toml").write_text(run_file(asked, folder / runs))
    command = ["slime", "run", str(folder / "run.toml"), "--fresh"]
    with subprocess.Popen(command, stdout=sys.stderr, start_new_session=True) as run:
        try:
            while run.poll() is None and not (
                asked.end_early and len(steps_of(folder / runs / "rollout")) == asked.steps
            ):
                time.sleep(0.5)
        finally:
            ended = run.poll()
            if ended is None:
                os.killpg(run.pid, signal.SIGKILL)
    if ended:
        raise subprocess.CalledProcessError(ended, command)
    return steps_of(folder / runs / "rollout")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ask_server(
    asked: argparse.Namespace, plain: PlainServer, prompts: list[list[int]]
) -> tuple[list[float], list[float]]:
    """Seconds of each round of a server of its own: asked directly, and through slime-router if it serves such servers."""
    with served(plain) as url:
        direct = asyncio.run(rounds(asked, plain, url, url, prompts))
        if not plain.routed:
            return direct, []
        with routed(url) as router:
            return direct, asyncio.run(rounds(asked, plain, router, url, prompts))


@contextlib.contextmanager
def served(plain: PlainServer) -> Iterator[str]:
    """Address of a server that was started for it."""
    port = free_port()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = plain.environment() | {"CUDA_VISIBLE_DEVICES": first}
    server = subprocess.Popen(plain.command(port), stdout=sys.stderr, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(url, server)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def by_requests_in_flight(asked: argparse.Namespace, folder: Path, plain: PlainServer | None) -> dict[str, Any]:
    """Tokens per second of a run that only generates and of the plain server, for each number of requests at once."""
    numbers = sorted(asked.in_flight)
    texts = itertools.cycle(prompts_of(asked))
    sizes = [numbers[0], *(number for number in numbers for _ in range(asked.rounds))]
    asks = [[next(texts) for _ in range(number // SAMPLES)] for number in sizes]
    began = time.perf_counter()
    seconds: list[float] = []
    overrides = {"rollout.debug_rollout_only": True, "rollout.concurrency": numbers[-1]}
    with slime_core.open_session(folder / "run.toml", overrides=overrides, fresh=True) as session:
        ready = time.perf_counter() - began
        for prompts in asks:
            start = time.perf_counter()
            groups = session.score(session.sample(prompts, n_samples=SAMPLES))
            seconds.append(time.perf_counter() - start)
            assert sum(len(group.samples) for group in groups) == len(prompts) * SAMPLES
    through_slime_s = speeds(asked, sizes, seconds)
    print(f"slime: up after {ready:.1f} s; tokens/s {through_slime_s}", file=sys.stderr, flush=True)
    found = {"slime_start_s": round(ready, 1), "in_flight_slime_tok_s": through_slime_s}
    if plain is None:
        return found
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    began = time.perf_counter()
    with served(plain) as url:
        ready = time.perf_counter() - began
        encoded = [[tokenizer.encode(prompt) for prompt in prompts] for prompts in asks]
        seconds = asyncio.run(rounds_of(asked, plain, url, url, encoded, numbers[-1]))
    directly = speeds(asked, sizes, seconds)
    ratios = {number: round(through_slime_s[number] / directly[number], 3) for number in numbers}
    return found | {"server_start_s": round(ready, 1), "in_flight_server_tok_s": directly, "in_flight_ratio": ratios}


def speeds(asked: argparse.Namespace, sizes: list[int], seconds: list[float]) -> dict[int, int]:
    """Median tokens per second by the number of requests; the first round is not counted."""
    return {
        number: round(
            number
            * asked.new_tokens
            / statistics.median(took for size, took in zip(sizes[1:], seconds[1:], strict=True) if size == number)
        )
        for number in dict.fromkeys(sizes)
    }


@contextlib.contextmanager
def routed(upstream: str) -> Iterator[str]:
    """Address of a slime-router without middlewares."""
    port = str(free_port())
    router = subprocess.Popen(["slime-router", "--port", port, "--no-token", "--upstream", upstream], stdout=sys.stderr)
    try:
        wait_until_up(f"http://127.0.0.1:{port}", router)
        yield f"http://127.0.0.1:{port}"
    finally:
        router.kill()
        router.wait()


async def rounds(
    asked: argparse.Namespace, plain: PlainServer, url: str, server: str, prompts: list[list[int]]
) -> list[float]:
    """`url`: where requests go; `server`: whose cache is dropped before each round."""
    per_step = asked.requests // SAMPLES
    steps = [prompts[step * per_step : (step + 1) * per_step] for step in range(asked.steps)]
    return await rounds_of(asked, plain, url, server, steps, asked.concurrency)


async def rounds_of(
    asked: argparse.Namespace,
    plain: PlainServer,
    url: str,
    server: str,
    steps: list[list[list[int]]],
    concurrency: int,
) -> list[float]:
    """Seconds of each step: SAMPLES requests for each of its prompts, `concurrency` at a time."""
    slots = asyncio.Semaphore(concurrency)
    seconds = []
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(place: int, prompt: list[int]) -> None:
            body = plain.body(place, prompt, asked.new_tokens)
            async with slots, session.post(f"{url}{plain.generate}", json=body) as response:
                reply = await response.json()
                assert plain.num_tokens(reply) == asked.new_tokens, reply

        for prompts in steps:
            async with session.post(f"{server}{plain.flush}"):
                pass
            of_step = [prompt for prompt in prompts for _ in range(SAMPLES)]
            began = time.perf_counter()
            await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(of_step)))
            seconds.append(time.perf_counter() - began)
    return seconds


def wait_until_up(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server of {url} ended with exit code {server.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=30).status_code == 200:
                return
        time.sleep(1)
    raise TimeoutError(f"no response from {url} in {START_S:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--placement", choices=["colocated", "disaggregated"], default="colocated")
    parser.add_argument(
        "--gpus", type=int, default=1, help="of the trainer, and of the engines: of both where colocated"
    )
    parser.add_argument(
        "--routing-replay", action="store_true", help="a mixture of experts is trained with the experts of the engine"
    )
    parser.add_argument(
        "--mismatch",
        action="store_true",
        help="the trainer's log-probs with the engine's in `diff`: a forward more a step",
    )
    parser.add_argument("--transport", help="by default ipc where colocated, else distributed")
    parser.add_argument("--requests", type=int, default=1024, help="a step; eight for each prompt")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--train-tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument(
        "--engine",
        type=json.loads,
        action="append",
        default=[],
        help="the engine's options as JSON, with its name unless it is sglang; may be given several times",
    )
    parser.add_argument(
        "--backend", type=json.loads, default={"name": "fsdp"}, help="the backend and its options as JSON"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--run-only", action="store_true", help="without the plain server")
    only.add_argument("--server-only", action="store_true", help="the plain server alone")
    parser.add_argument(
        "--end-early", action="store_true", help="kill the run before its last checkpoint, which takes minutes at 4B"
    )
    parser.add_argument(
        "--in-flight", type=lambda text: [int(number) for number in text.split(",")], help="multiples of eight"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each number in flight")
    parser.add_argument("--keep", type=Path, help="a folder that is kept, and used again if it is there")
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "model" / "config.json").exists():
            write_model(folder / "model", asked)
        prompts = prompts_of(asked)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        tokens = [tokenizer.encode(prompt) for prompt in prompts]
        for number, engine in enumerate(asked.engine or [{}]):
            chosen = argparse.Namespace(**vars(asked) | {"engine": {"name": "sglang", **engine}})
            measured = in_flight if asked.in_flight else measure
            print(json.dumps(measured(chosen, folder, f"runs-{number}", tokens)), flush=True)


def in_flight(asked: argparse.Namespace, folder: Path, runs: str, tokens: list[list[int]]) -> dict[str, Any]:
    """One engine by the number of requests in flight."""
    (folder / "even.py").write_text(REWARD)
    (folder / "run.toml").write_text(run_file(asked, folder / runs))
    options = asked.engine | PROGRAMS[asked.engine["name"]].batch_options(max(asked.in_flight))
    plain = PROGRAMS[asked.engine["name"]](options, folder / "model", asked.device)
    found = by_requests_in_flight(asked, folder, None if asked.run_only else plain)
    return {"shape": asked.shape, "engine": asked.engine["name"], "new_tokens": asked.new_tokens} | found


def measure(asked: argparse.Namespace, folder: Path, runs: str, tokens: list[list[int]]) -> dict[str, Any]:
    """One engine; `asked.engine` has its options."""
    steps = [] if asked.server_only else run_slime(asked, folder, runs)
    if steps:
        print(table(folder / runs / "rollout"), flush=True)
    plain = PROGRAMS[asked.engine["name"]](asked.engine, folder / "model", asked.device)
    compared = {} if asked.run_only else compare(asked, steps, *ask_server(asked, plain, tokens))
    return {
        "shape": asked.shape,
        "engine": asked.engine["name"],
        "backend": asked.backend["name"],
        "placement": asked.placement,
        "requests": asked.requests,
        "concurrency": asked.concurrency,
        "new_tokens": asked.new_tokens,
        "slime_tok_s": [round(value) for value in through_slime(asked, steps)],
        **compared,
        **{f"{name}_s": [round(step.get(f"perf/{name}_time", 0), 3) for step in steps] for name in TIMES},
        "diff": differences(folder / runs / "rollout"),
    }


def through_slime(asked: argparse.Namespace, steps: list[dict[str, float]]) -> list[float]:
    return [asked.requests * step["rollout/response_len/mean"] / step["perf/rollout_time"] for step in steps[1:]]


def compare(
    asked: argparse.Namespace, steps: list[dict[str, float]], raw: list[float], behind_router: list[float]
) -> dict[str, Any]:
    direct = tokens_per_second(asked, raw)
    compared: dict[str, Any] = {"server_tok_s": [round(value) for value in direct]}
    if steps:
        compared["ratio"] = round(statistics.median(through_slime(asked, steps)) / statistics.median(direct), 3)
    if behind_router:
        through_router = tokens_per_second(asked, behind_router)
        compared |= {
            "slime_router_tok_s": [round(value) for value in through_router],
            "router_ratio": round(statistics.median(through_router) / statistics.median(direct), 3),
        }
    return compared


def tokens_per_second(asked: argparse.Namespace, seconds: list[float]) -> list[float]:
    return [asked.requests * asked.new_tokens / each for each in seconds[1:]]


if __name__ == "__main__":
    main()
