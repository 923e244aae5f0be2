"""slime-router's cost, beside the bare sglang-router's, in front of a scripted fake SGLang engine.

The engine is a script (`fake_engine` below): it waits as long as a real one would take for 1,000 tokens and responds with bytes
that were made beforehand, so that what is measured is the way to it and back. Everything runs on this machine: the load,
the engines and the router under test, each in a process of its own.

Open loop: requests leave at a fixed rate, whatever has been served, and are timed from when they should have left. Each way
takes its turn in every round; `added` is a way's quantile less that of asking the engines directly, in the same round.
Ceiling: a closed loop of 32 connections and engines that respond at once. The figure is requests over the router's own CPU
seconds (user and system, all its threads): what one core serves.

    python benchmarks/router.py
    python benchmarks/router.py --seconds 3 --rounds 1 --ways direct,slime-router
    python benchmarks/router.py --record            # on a quiet machine: appends to RESULTS.md
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import gc
import importlib.util
import json
import os
import platform
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
import uvloop
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
NUM_ENGINES = 2
NUM_TOKENS = 1000
NUM_EVENTS = 20
"""Events of a streamed response, of 50 tokens each, as with --stream-interval 50 and incremental output."""
PROMPT = list(range(1000, 1512))
LIBRARIES = ("slime-router", "sglang-router", "uvicorn", "aiohttp", "starlette", "msgspec")
CONNECTIONS = 32


def response_to(tokens: Sequence[int], *, completed: int, finished: bool) -> dict[str, Any]:
    draw = random.Random(tokens[0])
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": NUM_TOKENS} if finished else None,
        "prompt_tokens": len(PROMPT),
        "weight_version": "3",
        "output_token_logprobs": [[draw.uniform(-8, 0), token, None] for token in tokens],
        "completion_tokens": completed,
        "cached_tokens": 256,
        "e2e_latency": 0.5,
    }
    return {"text": " token" * len(tokens), "output_ids": list(tokens), "meta_info": meta}


def fake_engine(port: int, delay_s: float) -> None:
    """An ASGI server that responds to POST /generate after `delay_s`, whole or in events spread over it."""
    import uvicorn

    tokens = [10_000 + number for number in range(NUM_TOKENS)]
    whole = json.dumps(response_to(tokens, completed=NUM_TOKENS, finished=True)).encode()
    size = NUM_TOKENS // NUM_EVENTS
    events = [
        b"data: "
        + json.dumps(
            response_to(tokens[at : at + size], completed=at + size, finished=at + size == NUM_TOKENS)
        ).encode()
        + b"\n\n"
        for at in range(0, NUM_TOKENS, size)
    ]
    small = json.dumps({"status": "ok", "model_path": "fake", "served_model_name": "fake"}).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] != "/generate":
            await respond(send, small, b"application/json")
        elif b'"stream":true' in body.replace(b" ", b""):
            head = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            for event in events:
                if delay_s:
                    await asyncio.sleep(delay_s / NUM_EVENTS)
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        else:
            if delay_s:
                await asyncio.sleep(delay_s)
            await respond(send, whole, b"application/json")

    async def respond(send: Any, body: bytes, kind: bytes) -> None:
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    uvicorn.run(app, port=port, log_level="critical", loop="uvloop", http="httptools", lifespan="off", backlog=4096)


@dataclass(frozen=True)
class Way:
    """The routers between load and engines, the outermost first."""

    name: str
    middlewares: tuple[str, ...] | None = None
    sglang_router: bool = False


def ways(folder: Path) -> list[Way]:
    record = f'{{ name = "record", path = "{folder}/responses.jsonl" }}'
    return [
        Way("direct"),
        Way("slime-router", ()),
        Way("slime-router + 4 that route", ("retry", "priority", "load_balance", "session_affinity")),
        Way("slime-router + record", (record,)),
        Way("sglang-router", sglang_router=True),
        Way("slime-router before sglang-router", (), sglang_router=True),
    ]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[psutil.Process]:
    """In a process group of its own, which ends with this."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.asynccontextmanager
async def standing(way: Way, engines: Sequence[str], session: aiohttp.ClientSession) -> AsyncIterator[Any]:
    """(addresses to ask, process of the outermost router)."""
    upstreams = list(engines)
    outermost: psutil.Process | None = None
    with contextlib.ExitStack() as stack:
        if way.sglang_router:
            ports = [str(free_port()) for _ in range(2)]
            command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", ports[0]]
            command += ["--prometheus-port", ports[1], "--policy", "round_robin", "--log-level", "error"]
            outermost = stack.enter_context(started([*command, "--worker-urls", *upstreams]))
            upstreams = [f"http://127.0.0.1:{ports[0]}"]
            await ready(session, upstreams[0], workers=len(engines))
        if way.middlewares is not None:
            port = free_port()
            code = "from slime_router.server.cli import main; main()"
            command = [sys.executable, "-c", code, "--port", str(port), "--no-token"]
            for url in upstreams:
                command += ["--upstream", url]
            for middleware in way.middlewares:
                command += ["--middleware", middleware]
            outermost = stack.enter_context(started(command))
            upstreams = [f"http://127.0.0.1:{port}"]
            await ready(session, upstreams[0])
        yield upstreams, outermost


async def ready(session: aiohttp.ClientSession, url: str, workers: int = 0) -> None:
    path = "/workers" if workers else "/health"
    for _ in range(600):
        with contextlib.suppress(aiohttp.ClientError, ValueError):
            async with session.get(url + path) as got:
                if got.status == 200 and (not workers or len((await got.json())["workers"]) == workers):
                    return
        await asyncio.sleep(0.1)
    raise SystemExit(f"{url} is not ready after a minute")


async def ask(session: aiohttp.ClientSession, url: str, body: bytes) -> None:
    async with session.post(url + "/generate", data=body, headers={"content-type": "application/json"}) as got:
        data = await got.read()
        if got.status != 200 or len(data) < 20 * NUM_TOKENS:
            raise SystemExit(f"{url} responded {got.status}: {data[:200]!r}")


def body_of(number: int, stream: bool) -> bytes:
    params = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "sampling_seed": number}
    fields = {"rid": f"{number:032x}", "input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    return json.dumps({**fields, "stream": stream}).encode()


async def open_loop(
    session: aiohttp.ClientSession, urls: Sequence[str], rate: float, seconds: float, stream: bool
) -> list[float]:
    """Seconds of each request, from when it should have left; the first of them are warm-up and do not count."""
    warm_up = int(rate)
    total = warm_up + int(rate * seconds)
    bodies = [body_of(number, stream) for number in range(total)]
    begun = time.perf_counter() + 0.1
    gc.collect()
    gc.freeze()

    async def one(number: int) -> float:
        due = begun + number / rate
        await ask(session, urls[number % len(urls)], bodies[number])
        return time.perf_counter() - due

    tasks = []
    for number in range(total):
        await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number)))
    return (await asyncio.gather(*tasks))[warm_up:]


async def closed_loop(
    session: aiohttp.ClientSession, urls: Sequence[str], router: psutil.Process, seconds: float, stream: bool
) -> tuple[float, float]:
    """(requests per second, requests per CPU second of the router)."""
    body = body_of(1, stream)
    done = 0
    end = time.perf_counter() + 1 + seconds

    async def keep_asking() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await ask(session, urls[0], body)
            done += 1

    async def measure() -> tuple[float, float]:
        await asyncio.sleep(1)
        first, count, at = cpu_seconds(router), done, time.perf_counter()
        await asyncio.sleep(seconds - 0.2)
        spent, served, passed = cpu_seconds(router) - first, done - count, time.perf_counter() - at
        return served / passed, served / spent

    measured = asyncio.create_task(measure())
    await asyncio.gather(*(keep_asking() for _ in range(CONNECTIONS)))
    return await measured


def cpu_seconds(process: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(options: argparse.Namespace, folder: Path) -> str:
    chosen = [way for way in ways(folder) if not options.ways or way.name in options.ways.split(",")]
    if importlib.util.find_spec("sglang_router") is None:
        chosen = [way for way in chosen if not way.sglang_router]
        print("sglang-router is not installed: measured without it", file=sys.stderr)
    latency: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    ceiling: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**18) as session:
        for stream in (False, True):
            with engines_at(options.delay) as engines:
                for url in engines:
                    await ready(session, url)
                for _ in range(options.rounds):
                    for way in chosen:
                        async with standing(way, engines, session) as (urls, _):
                            seconds = await open_loop(session, urls, options.rate, options.seconds, stream)
                        figures = (quantile(seconds, 0.5), quantile(seconds, 0.99))
                        latency.setdefault((way.name, stream), []).append(figures)
            with engines_at(0.0) as engines:
                for url in engines:
                    await ready(session, url)
                for _ in range(options.rounds):
                    for way in chosen[1:]:
                        async with standing(way, engines, session) as (urls, router):
                            figures = await closed_loop(session, urls, router, options.seconds, stream)
                        ceiling.setdefault((way.name, stream), []).append(figures)
    return report(options, chosen, latency, ceiling)


@contextlib.contextmanager
def engines_at(delay_s: float) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(NUM_ENGINES)]
        for port in ports:
            command = [sys.executable, __file__, "--fake-engine", str(port), "--delay", str(delay_s)]
            stack.enter_context(started(command))
        yield [f"http://127.0.0.1:{port}" for port in ports]


def report(
    options: argparse.Namespace,
    chosen: Sequence[Way],
    latency: dict[tuple[str, bool], list[tuple[float, float]]],
    ceiling: dict[tuple[str, bool], list[tuple[float, float]]],
) -> str:
    """A table in Markdown; the same on the terminal."""
    columns = (
        "way",
        "answers",
        "p50 ms",
        "p99 ms",
        "added p50 ms",
        "added p99 ms",
        "requests/s",
        "requests/s per core",
    )
    rows: list[tuple[str, ...]] = []
    for stream in (False, True):
        for way in chosen:
            found = latency[way.name, stream]
            row = [
                way.name,
                "streamed" if stream else "whole",
                *(f"{1e3 * median(one):.1f}" for one in zip(*found, strict=True)),
            ]
            direct = latency[chosen[0].name, stream]
            if way is chosen[0]:
                row += ["", "", "", ""]
            else:
                for place in range(2):
                    added = [1e3 * (one[place] - base[place]) for one, base in zip(found, direct, strict=True)]
                    row.append(f"{median(added):.1f} ({min(added):.1f} to {max(added):.1f})")
                row += [f"{median(one):,.0f}" for one in zip(*ceiling[way.name, stream], strict=True)]
            rows.append(tuple(row))
    table = Table(*columns, box=SIMPLE)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
    lines = ["| " + " | ".join(row) + " |" for row in (columns, tuple("---" for _ in columns), *rows)]
    versions = ", ".join(
        f"{name} {version(name)}" for name in LIBRARIES if importlib.util.find_spec(name.replace("-", "_"))
    )
    return "\n".join(
        [
            f"## {datetime.date.today()}: routers in front of scripted fake engines",
            "",
            f"`python {shlex.join([str(Path(sys.argv[0]).resolve().relative_to(HERE.parent)), *sys.argv[1:]])}` on "
            f"{platform.machine()}, {os.cpu_count()} cores, "
            f"Python {platform.python_version()}; {versions}. Open loop at {options.rate:g} requests/s for "
            f"{options.seconds:g} s, {options.rounds} rounds; responses of {NUM_TOKENS} tokens with log-probs after "
            f"{options.delay:g} s, streamed in {NUM_EVENTS} events. Medians over the rounds, extremes in brackets.",
            "",
            *lines,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second of the open loop")
    parser.add_argument("--delay", type=float, default=1.0, help="seconds that an engine takes for a response")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="", help="some of them, separated by commas, `direct` among them")
    parser.add_argument("--record", action="store_true", help="append to RESULTS.md")
    parser.add_argument("--fake-engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fake_engine is not None:
        fake_engine(options.fake_engine, options.delay)
        return
    # SIGTERM also ends the processes that this program started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        text = uvloop.run(measure(options, Path(folder)))
    if options.record:
        with RESULTS.open("a") as results:
            results.write("\n" + text)
    else:
        print(text)


if __name__ == "__main__":
    main()
