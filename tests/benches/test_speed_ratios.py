"""How many times as fast as a plain implementation the costly parts of a step are. Both do the same work in this process, in
turns, and the medians of five rounds are compared. A test fails at half of what was measured when its figure was written down.

Figures in seconds are in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from slime_core.algorithm.build_batch import build_batch
from slime_core.algorithm.flops import ModelShape
from slime_core.algorithm.loss_weights import loss_weights
from slime_core.algorithm.micro_batches import MicroBatchLimits, plan_step
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.setup import EngineSetup
from slime_core.types.batch import TokenColumns
from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams
from slime_core.types.prompt import Prompt
from slime_core.types.sample import SampleGroup, VersionSpan
from slime_core.types.trajectory import Trajectory
from slime_fsdp.plugin import Fsdp
from slime_local.plugin import Local
from slime_models.new_model import ModelSizes, new_model
from slime_plugin_kit.tiny_model import ALPHABET, FIRST_TOKEN, load_plain
from slime_plugin_kit.tiny_training import ADAM, Place, objective_of, opened
from slime_sglang.generation import SglangRunning

pytestmark = pytest.mark.bench

ROUNDS = 5
# Measured on two loaded cores with and without AVX-512, 2026-11-26.
SAMPLING, TRAINING, READING, BATCHES, PLANNING = 1.7, 2.0, 3.2, 3.5, 18.0
VOCABULARY = FIRST_TOKEN + len(ALPHABET)


def times_as_fast(ours: Callable[[], Any], plain: Callable[[], Any]) -> float:
    """Median time of `plain` over that of `ours`, in turns, after one call of each."""
    ours()
    plain()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for own, run in zip(seconds, (ours, plain), strict=True):
            began = time.perf_counter()
            run()
            own.append(time.perf_counter() - began)
    ratio = median(seconds[1]) / median(seconds[0])
    print(f"{ratio:.2f} times as fast: {median(seconds[0]):.4f} s, plain {median(seconds[1]):.4f} s")
    return ratio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    sizes = ModelSizes(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128, max_length=640)
    new_model(folder, "qwen3", sizes, alphabet=ALPHABET, seed=3)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lengths_of(count: int, seed: int) -> list[int]:
    """Log-normal, as responses are: half of them are shorter than 30 tokens."""
    return np.clip(np.random.default_rng(seed).lognormal(np.log(30), 0.8, count), 2, 100).astype(int).tolist()


def test_sampling(model: Path) -> None:
    """slime-local beside transformers' `generate`: 128 responses of uneven lengths, which `generate` pads to the longest."""
    rng = np.random.default_rng(0)
    lengths = lengths_of(128, seed=1)
    prompts = [rng.integers(FIRST_TOKEN, VOCABULARY, 12).astype(np.int32) for _ in lengths]
    plain_model = load_plain(model, torch.float32)
    plain_model.generation_config.eos_token_id = None
    ended: list[int] = []

    async def start() -> Any:
        engine = Local.build(Local.Config())
        setup = EngineSetup(
            index=0, model_path=model, device="cpu", seed=0, max_context_len=256, max_batch=256, run_dir=model
        )
        await engine.start(setup)
        return engine

    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(start())

    def ours() -> None:
        requests = [
            GenerateRequest(
                request_id=str(number),
                token_ids=prompt,
                sampling=SamplingParams(max_new_tokens=length, min_new_tokens=length),
                seed=number,
            )
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        completions = loop.run_until_complete(engine.generate(requests))
        ended[:] = [len(completion.token_ids) for completion in completions]

    def plain() -> None:
        with torch.no_grad():
            plain_model.generate(
                torch.from_numpy(np.stack(prompts)).long(),
                do_sample=True,
                top_k=0,
                max_new_tokens=max(lengths),
                min_new_tokens=max(lengths),
                output_logits=True,
                return_dict_in_generate=True,
            )

    try:
        ratio = times_as_fast(ours, plain)
    finally:
        loop.run_until_complete(engine.stop())
        loop.close()
    assert ended == lengths
    assert ratio > SAMPLING / 2


def test_training(model: Path) -> None:
    """A step of slime-fsdp beside transformers with padded rows and torch's AdamW: 64 sequences of uneven lengths."""
    groups = sample_groups(64, seed=2)
    batch = build_batch(groups)
    samples = np.arange(batch.num_samples)
    columns = TokenColumns(
        advantages=np.ones(len(batch.mask), np.float32),
        returns=np.ones(len(batch.mask), np.float32),
        loss_weight=loss_weights(batch, np.zeros(batch.num_samples, np.int64), Aggregation.SEQ_MEAN, 200),
    )
    micros = [pack_micro_batch(batch, half, columns=columns, temperature=1.0) for half in np.array_split(samples, 2)]
    plain_model = load_plain(model, torch.float32).train()
    optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-3)
    rows = [torch.from_numpy(sample.tokens).long() for group in groups for sample in group.samples]

    def plain() -> None:
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            padded = torch.nn.utils.rnn.pad_sequence(half, batch_first=True)
            attended = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in half], batch_first=True)
            logits = plain_model(padded, attention_mask=attended).logits[:, :-1]
            log_probs = logits.log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            chosen = log_probs.gather(-1, padded[:, 1:, None])[..., 0]
            trained = attended[:, 1:].bool()
            (-(chosen + 0.1 * entropy)[trained].mean()).backward()
        torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with opened(Fsdp.build(Fsdp.Config()), Place(model=model), optimizer=ADAM, total_steps=100) as place:
        ratio = times_as_fast(lambda: place.backend.train_step(micros, objective_of()), plain)
    assert ratio > TRAINING / 2


def test_reading_responses() -> None:
    """What slime-sglang does with a response of 1,000 tokens, beside json and lists, as upstream has it."""
    draw = random.Random(0)
    ids = [draw.randrange(150_000) for _ in range(1000)]
    meta = {
        "finish_reason": {"type": "length", "length": 1000},
        "prompt_tokens": 8,
        "weight_version": "default",
        "output_token_logprobs": [[draw.uniform(-8, 0), token, None] for token in ids],
        "completion_tokens": 1000,
    }
    content = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
    request = GenerateRequest(
        request_id="a", token_ids=np.arange(8, dtype=np.int32), sampling=SamplingParams(max_new_tokens=1000), seed=1
    )

    def ours() -> None:
        for _ in range(100):
            running = SglangRunning(vocab_size=150_000, request=request)
            running.take(orjson.loads(content), expected_version=-1, server="engine 0")
        assert running.token_ids.tolist() == ids

    def plain() -> None:
        for _ in range(100):
            found = json.loads(content)["meta_info"]["output_token_logprobs"]
            tokens = torch.tensor([item[1] for item in found])
            torch.tensor([item[0] for item in found], dtype=torch.float32)
        assert tokens.tolist() == ids

    assert times_as_fast(ours, plain) > READING / 2


def test_batches() -> None:
    """`build_batch` of 1,024 samples, beside lists of tokens, masks and log-probs that become one tensor each."""
    groups = sample_groups(1024, seed=3)
    listed = [
        (sample.tokens.tolist(), sample.loss_mask.tolist(), sample.rollout_log_probs.tolist())
        for group in groups
        for sample in group.samples
    ]

    def plain() -> None:
        dtypes = (torch.int32, torch.uint8, torch.float32)
        for column, dtype in zip(zip(*listed, strict=True), dtypes, strict=True):
            torch.cat([torch.tensor(values, dtype=dtype) for values in column])

    assert times_as_fast(lambda: build_batch(groups), plain) > BATCHES / 2


def test_planning() -> None:
    """Micro-batches of 4,096 samples, beside a loop that looks at every micro-batch for every sample."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(2000), 1, 4096), 32, 16384).astype(np.int64)
    shape = ModelShape(num_layers=36, hidden=2560, num_heads=32, num_kv_heads=8, head_dim=128, ffn=9728, vocab=151_936)
    limits = MicroBatchLimits(max_tokens=16384)
    samples = np.arange(len(lengths))

    def plain() -> None:
        costs = shape.forward_flops(lengths)
        count = 8 * -(-int(lengths.sum()) // (16384 * 8)) + 8
        sums, sizes = [0.0] * count, [0] * count
        for number in sorted(range(len(lengths)), key=lambda sample: -costs[sample]):
            fits = [one for one in range(count) if sizes[one] + lengths[number] <= 16384] or [0]
            least = min(fits, key=lambda one: sums[one])
            sums[least] += costs[number]
            sizes[least] += lengths[number]

    def ours() -> None:
        plan_step(samples, lengths, dp_size=8, limits=limits, shape=shape, balance=True)

    assert times_as_fast(ours, plain) > PLANNING / 2


def sample_groups(count: int, seed: int) -> list[SampleGroup]:
    rng = np.random.default_rng(seed)
    groups = []
    for number, length in enumerate(lengths_of(count, seed)):
        prompt = Prompt(
            group_index=number, text="", token_ids=rng.integers(FIRST_TOKEN, VOCABULARY, 12).astype(np.int32)
        )
        grown = Trajectory(prompt, index=number, rollout_id=0, tokenizer=NoText())
        grown.append_completion(
            Completion(
                request_id="",
                token_ids=rng.integers(FIRST_TOKEN, VOCABULARY, length).astype(np.int32),
                log_probs=-rng.random(length).astype(np.float32),
                finish_reason=FinishReason.STOP,
                spans=(VersionSpan(0, 0, length),),
            )
        )
        groups.append(SampleGroup(prompt=prompt, samples=(grown.finish(reward=1.0),)))
    return groups


class NoText:
    is_fast = False

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ""
