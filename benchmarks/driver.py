"""Tokens per second that a run takes from engines that respond at once, or at a given speed, and the CPU time for each.

    python benchmarks/driver.py [--groups 256] [--steps 4] [--tokens 1000] [--senders 1] [--workers 0 1 2]
        [--concurrency 256] [--engines 1] [--speed 25000] [--launcher ray] [--turns 4] [--tool-seconds 0.5] [--profile]

`slime run --debug-rollout-only` with the engine `sglang` asks servers over HTTP. The servers are this file (`--serve`):
they have SGLang's routes and respond with bytes that were made beforehand, tokens with log-probs in SGLang's form. Each has a
process of its own; the driver should have a core for itself.

`--workers`: rollout workers, one line for each number; 0: the driver does all. Each is a process, with another one for rewards.
`--engines`: each has a server of its own; `--senders` processes are all of them. `--speed`: tokens per second of an engine
whose share of `--concurrency` is in use: a response comes after its share of the time. `--turns`: a response is that many
requests, of equal parts of `--tokens`, with a tool between them that waits for `--tool-seconds` and returns 50 tokens; the
turns of a response stay on one engine (middleware `session_affinity`).

The first step is warm-up. `tokens/s` is response tokens over `perf/rollout_time` of the median step. An observer reads the CPU
time (user and system) at the end of each step: the driver's own, and that of its children.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pstats
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

SAMPLES: Final = 8
"""Of a prompt."""
TOOL_TOKENS: Final = 50
"""What a tool returns."""
ALPHABET: Final = "0123456789+=? abcdefghijklmnopqrstuvwxyz"
REWARD: Final = """
import time

import psutil

from slime_core.plugin import hook, reward

@reward("even")
def even(sample):
    return float(sample.index % 2)

@hook
def rollout_end(event):
    # CPU seconds so far: of the driver, and of its children.
    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    with (event.run.run_dir / "cpu").open("a") as file:
        file.write(f"{time.process_time()} {sum(one.user + one.system for one in children)}\\n")
"""
TOOLS: Final = """
import asyncio
from dataclasses import replace

import numpy as np

from slime_core.plugin import generator

@generator("tools")
async def tools(episode):
    response = episode.trajectory()
    each = replace(episode.sampling, max_new_tokens={each})
    for turn in range({turns}):
        response.append_completion(await episode.complete(response.tokens, each))
        if turn < {turns} - 1:
            await asyncio.sleep({seconds})
            response.append_environment(np.full({tool_tokens}, 9, np.int32))
    return [response.finish()]
"""
RUN: Final = """
[model]
hf_checkpoint = "model"
[data]
prompt_data = "train.jsonl"
"""
SLIME: Final = [sys.executable, "-c", "from slime_core.cli.main import main; main()"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    cpu_s: Sequence[tuple[float, float]]
    """CPU time at the end of each step, of the driver and of its child processes."""
    rollout_s: Sequence[float]
    """Of each step."""


def response(draw: random.Random, tokens: int, vocab_size: int) -> bytes:
    """In SGLang's form; its weight version is VERSION."""
    import orjson

    ids = [draw.randrange(8, vocab_size) for _ in range(tokens)]
    return orjson.dumps(
        {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": "0" * 32,
                "finish_reason": {"type": "length", "length": tokens},
                "prompt_tokens": 8,
                "weight_version": "VERSION",
                "output_token_logprobs": [[draw.uniform(-8, 0), token, None] for token in ids],
                "completion_tokens": tokens,
                "cached_tokens": 0,
                "e2e_latency": 0.5,
            },
        }
    )


def serve(ports: Sequence[int], tokens: int, vocab_size: int, delay_s: float) -> None:
    """An ASGI server with the routes of SGLang that a run asks, as many servers as ports. A response comes after `delay_s`,
    one of fewer tokens than `tokens` sooner."""
    import orjson
    import uvicorn

    draw = random.Random(0)
    version = b"default"
    responses = [response(draw, tokens, vocab_size) for _ in range(64)]
    ready = list(responses)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal version, ready
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        if path == "/generate":
            if delay_s:
                asked = orjson.loads(body)["sampling_params"]["max_new_tokens"]
                await asyncio.sleep(delay_s * min(asked / tokens, 1.0))
            content = ready[draw.randrange(len(ready))]
        elif path == "/server_info":
            content = orjson.dumps({"version": "0.5.20", "tp_size": 1})
        elif path == "/model_info":
            content = orjson.dumps({"weight_version": version.decode()})
        else:
            given = orjson.loads(body).get("weight_version") if body else None
            version = version if given is None else given.encode()
            ready = [one.replace(b"VERSION", version) for one in responses]
            content = b'{"success":true,"message":""}'
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    ready = [one.replace(b"VERSION", version) for one in responses]
    config = uvicorn.Config(app, log_level="critical", loop="uvloop", http="httptools", lifespan="off", backlog=4096)
    uvicorn.Server(config).run(sockets=[socket.create_server(("127.0.0.1", port), backlog=4096) for port in ports])


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [end.getsockname()[1] for end in ends]


@contextlib.contextmanager
def senders(processes: int, engines: int, tokens: int, delay_s: float) -> Iterator[list[str]]:
    """Addresses of servers that respond with `tokens`, one for each engine, or for each process if there is one engine."""
    ports = free_ports(max(processes, engines))
    command = [sys.executable, __file__, "--tokens", str(tokens), "--delay", str(delay_s), "--serve"]
    shares = [list(map(str, ports[number::processes])) for number in range(processes)]
    started = [subprocess.Popen([*command, *share], start_new_session=True) for share in shares]
    try:
        for port in ports:
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/model_info"):
                    break
                time.sleep(0.1)
        yield [f"127.0.0.1:{port}" for port in ports]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(
    folder: Path,
    name: str,
    addresses: Sequence[str],
    *,
    typed: argparse.Namespace,
    workers: int,
) -> Ran:
    command = [
        *([sys.executable, "-m", "cProfile", "-o", f"{name}.prof", "slime_main.py"] if typed.profile else SLIME),
        "run", "run.toml", "--name", name, "--plugin", "even.py", "--reward", "even", "--engine", "sglang",
        "--sglang-external-engine-addrs", *addresses, "--sglang-servers", str(len(addresses) // typed.engines),
        "--debug-rollout-only", "--num-rollout", str(typed.steps), "--rollout-batch-size", str(typed.groups),
        "--n-samples-per-prompt", str(SAMPLES), "--rollout-max-response-len", str(length(typed)), "--concurrency",
        str(typed.concurrency // typed.engines), "--algo", "grpo", "--backend", "fsdp", "--rollout-workers", str(workers),
        "--rollout-num-gpus", str(typed.engines), "--launcher", typed.launcher,
    ]  # fmt: skip
    if typed.launcher == "ray":
        command += ["--set", "launcher.num_cpus_per_worker=0.01"]
    if typed.turns > 1:
        command += ["--plugin", "tools.py", "--generate", "tools", "--set", 'router.middlewares=["session_affinity"]']
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(
            f"{' '.join(command)}: exit code {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
        )
    metrics = [json.loads(line)["metrics"] for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    cpu = [line.split() for line in (folder / f"runs/{name}/cpu").read_text().splitlines()]
    return Ran(
        cpu_s=[(float(driver), float(children)) for driver, children in cpu],
        rollout_s=[line["perf/rollout_time"] for line in metrics if "perf/rollout_time" in line],
    )


def length(typed: argparse.Namespace) -> int:
    """Tokens of a response, with those of its tools."""
    return int(typed.tokens + (typed.turns - 1) * TOOL_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=256, help="prompts of a step; 8 samples each")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--senders", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[0])
    parser.add_argument("--concurrency", type=int, default=256, help="requests at once, of all engines together")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--speed", type=float, help="tokens per second of an engine; by default it responds at once")
    parser.add_argument("--launcher", default="local")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--tool-seconds", type=float, default=0.5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--delay", type=float, default=0.0, help=argparse.SUPPRESS)
    typed = parser.parse_args()
    if typed.concurrency < typed.engines:
        parser.error(f"--concurrency {typed.concurrency}: {typed.engines} engines have at least a request each")
    if typed.serve is not None:
        serve(typed.serve, typed.tokens, len(ALPHABET), typed.delay)
        return
    # `timeout` ends it so: the senders end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    each = typed.tokens // typed.turns
    # As long as all slots of an engine are in use, it makes `speed` tokens per second.
    delay_s = 0.0 if typed.speed is None else each * typed.concurrency / typed.engines / typed.speed
    with tempfile.TemporaryDirectory() as made, senders(typed.senders, typed.engines, each, delay_s) as addresses:
        folder = Path(made)
        new = ["models", "new", "model", "--alphabet", ALPHABET, "--max-length", str(length(typed) + 64)]
        subprocess.run([*SLIME, *new], cwd=folder, check=True, capture_output=True)
        (folder / "train.jsonl").write_text('{"input": "1+1=?", "label": "2"}\n' * 64)
        (folder / "even.py").write_text(REWARD)
        (folder / "run.toml").write_text(RUN)
        (folder / "tools.py").write_text(
            TOOLS.format(each=each, turns=typed.turns, seconds=typed.tool_seconds, tool_tokens=TOOL_TOKENS)
        )
        (folder / "slime_main.py").write_text(SLIME[-1])
        for workers in typed.workers:
            measure(folder, addresses, typed, workers)


def measure(folder: Path, addresses: Sequence[str], typed: argparse.Namespace, workers: int) -> None:
    ran = run(folder, f"workers-{workers}", addresses, typed=typed, workers=workers)
    if typed.profile:
        pstats.Stats(str(folder / f"workers-{workers}.prof")).sort_stats("tottime").print_stats(40)
    of_step = typed.groups * SAMPLES * (typed.tokens // typed.turns * typed.turns)
    speed = of_step / median(ran.rollout_s[1:])
    spent = [last - first for first, last in zip(ran.cpu_s[0], ran.cpu_s[-1], strict=True)]
    driver, others = (seconds / (of_step * (typed.steps - 1)) * 1e9 for seconds in spent)
    print(
        f"{workers} workers: {speed:,.0f} tokens/s; CPU of a token: {driver:.0f} ns of the driver "
        f"({1e9 / driver:,.0f} tokens/s of its core), {others:.0f} ns of others",
        flush=True,
    )


if __name__ == "__main__":
    main()
