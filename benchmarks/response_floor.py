"""The least Python of a rollout batch in which every response is a coroutine and rewards run in another process.

    python benchmarks/response_floor.py [--responses 3072] [--rounds 15]
    python benchmarks/trl_cpu.py --floor

Beside cpu_floor.py, which has the arithmetic of a GRPO step and nothing else: what a trainer cannot leave out if generators are
functions that users write and a reward that hangs may be killed. A response is a task that waits for a future, a request, a
text and a sample; its reward is compared in another process, which gets whole samples; the batch is one array for each
column. No time limits, checks, retries, metrics, stop strings or events.

The seconds of both floors together are the least of a step, since the torch threads of a small model wait while Python runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from transformers import AutoTokenizer

MODEL = Path(__file__).resolve().parent.parent / "examples" / "arithmetic" / "generated" / "base"
COPIES = 8
"""Responses to a prompt."""
PROMPT, RESPONSE = 7, 5
"""Tokens."""
PARCEL = 64
"""Groups of one message to the rewards."""


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    token_ids: Any
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    token_ids: Any
    log_probs: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    index: int
    group: int
    label: str
    tokens: Any
    log_probs: Any
    mask: Any
    text: str
    reward: float | None = None


def rewards(pipe: Connection) -> None:
    while (groups := pipe.recv()) is not None:
        pipe.send([[float(sample.text == sample.label) for sample in group] for group in groups])


async def respond(
    number: int, prompt: Any, asked: list[tuple[Request, asyncio.Future[Completion]]], decode: Any
) -> Sample:
    response: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    asked.append((Request(f"train/{number}/0", prompt, number), response))
    got = await response
    return Sample(
        index=number,
        group=number // COPIES,
        label="46",
        tokens=np.concatenate([prompt, got.token_ids]),
        log_probs=got.log_probs,
        mask=np.ones(len(got.token_ids), np.uint8),
        text=decode(got.token_ids),
    )


async def batch(count: int, decode: Any, pipe: Connection) -> dict[str, float]:
    """Seconds of each part."""
    ids = np.full((count, RESPONSE), 5, np.int32)
    log_probs = np.zeros((count, RESPONSE), np.float32)
    times = [time.perf_counter()]
    asked: list[tuple[Request, asyncio.Future[Completion]]] = []
    prompts = [np.arange(3, 3 + PROMPT, dtype=np.int32) for _ in range(count // COPIES)]
    tasks = [asyncio.create_task(respond(n, prompts[n // COPIES], asked, decode)) for n in range(count)]
    await asyncio.sleep(0)
    times.append(time.perf_counter())
    for row, (_, response) in enumerate(asked):
        response.set_result(Completion(ids[row], log_probs[row], "stop"))
    samples = await asyncio.gather(*tasks)
    times.append(time.perf_counter())
    groups = [samples[start : start + COPIES] for start in range(0, count, COPIES)]
    scored: list[Sample] = []
    for start in range(0, len(groups), PARCEL):
        parcel = groups[start : start + PARCEL]
        pipe.send(parcel)
        for group, values in zip(parcel, pipe.recv(), strict=True):
            scored += [replace(sample, reward=value) for sample, value in zip(group, values, strict=True)]
    times.append(time.perf_counter())
    columns(scored)
    times.append(time.perf_counter())
    names = ("tasks and requests", "responses and texts", "rewards", "columns")
    return dict(zip(names, np.diff(times).tolist(), strict=True))


def columns(samples: Sequence[Sample]) -> list[Any]:
    values = np.array([sample.reward for sample in samples], np.float32).reshape(-1, COPIES)
    advantages = (values - values.mean(1, keepdims=True)) / (values.std(1, keepdims=True) + 1e-6)
    return [
        np.concatenate([sample.tokens for sample in samples]),
        np.concatenate([sample.log_probs for sample in samples]),
        np.concatenate([sample.mask for sample in samples]),
        np.repeat(advantages.ravel(), [len(sample.mask) for sample in samples]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=3072)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--result", type=Path, help="file for the seconds of each round, as JSON")
    typed = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=rewards, args=(there,), daemon=True)
    process.start()
    # As in a run: what is there before the steps is not looked through.
    gc.freeze()
    found = [asyncio.run(batch(typed.responses, tokenizer.decode, here)) for _ in range(typed.rounds)][2:]
    here.send(None)
    for name in found[0]:
        seconds = median(one[name] for one in found)
        print(f"{name:22} {seconds * 1e3:6.1f} ms {seconds / typed.responses * 1e6:6.1f} us a response")
    sums = [sum(one.values()) for one in found]
    whole = median(sums)
    print(f"{'together':22} {whole * 1e3:6.1f} ms {whole / typed.responses * 1e6:6.1f} us a response")
    if typed.result is not None:
        typed.result.write_text(json.dumps(sums))


if __name__ == "__main__":
    main()
