"""Speed and memory of a backend's own training step on one GPU: a random model of a Qwen3 shape, clip loss.

    python benchmarks/train_gpu.py --options '{}' --options '{"compile": true}'
    python benchmarks/train_gpu.py --shape qwen3-4b --micros 1 --longest 16384 --shortest 16384 --options '{"compile": true}'
    python benchmarks/train_gpu.py --backend megatron --options '{"bf16": true}'
    python benchmarks/train_gpu.py --shape tiny --device cpu --tokens 512 --longest 128

Each step is `TrainBackend.train_step` on --micros micro-batches of --tokens packed tokens: forward, log-probs, loss,
backward, gradient norm, AdamW. No rollouts are part of it. Prints one JSON line for each --options; tokens are prompt and
response, `model_tflops` counts three forwards of the model (nothing for recomputation), and a score is a forward
without gradients. `mfu` is the share of 989 TFLOP/s by the formula of common tables, 6 N + 12 x layers x hidden size x
length of the longest sequence for each token (N: all parameters, embeddings too; of a
mixture of experts those that a token is computed with).

--profile prints the kernels of the last step of the warm-up too: seconds on the GPU, how often, and the kernel's name.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from slime_core import groups
from slime_core.algorithm.flops import ModelShape
from slime_core.algorithm.loss import TokenObjective
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.backend import TrainBackend
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import TrainerSetup
from slime_core.registry import Registry, bind
from slime_core.types.batch import Batch, TokenColumns

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 500,
    "tie_word_embeddings": True,
}
SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "small-moe": {
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 3072,
        "moe_intermediate_size": 768,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-moe-3b": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1024,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "tiny": TINY,
    "tiny-moe": TINY
    | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
}
PEAK_FLOPS = 989e12
"""Peak of an H100 or H200 in bfloat16."""


def write_model(folder: Path, shape: str, device: str) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        kind = Qwen3MoeConfig if "num_experts" in SHAPES[shape] else Qwen3Config
        model = AutoModelForCausalLM.from_config(
            kind(**SHAPES[shape], max_position_embeddings=131072), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)


def lengths_of(asked: argparse.Namespace, order: np.random.Generator) -> np.ndarray:
    """Sequences of `shortest` to `longest`, together exactly `tokens`."""
    shortest = asked.shortest or asked.longest * 3 // 4
    lengths: list[int] = []
    while (left := asked.tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(order.integers(shortest, asked.longest + 1))))
    return np.array(lengths, np.int32)


def make_batch(asked: argparse.Namespace, vocab: int, seed: int) -> tuple[Batch, list[np.ndarray]]:
    """A batch of random sequences. `asked.same_prompt` neighbors have the same prompt, as samples of a group have."""
    order = np.random.default_rng(seed)
    per_micro = [lengths_of(asked, order) for _ in range(asked.micros)]
    total = np.concatenate(per_micro)
    prompt = np.clip(total - 1, 1, int(asked.longest * asked.prompt_share)).astype(np.int32)
    starts = np.cumsum(total) - total
    tokens = order.integers(vocab, size=int(total.sum())).astype(np.int32)
    for i in range(len(total)):
        first = i - i % asked.same_prompt
        same = min(prompt[i], prompt[first])
        tokens[starts[i] : starts[i] + same] = tokens[starts[first] : starts[first] + same]
    number = np.arange(len(total))
    num_response = int((total - prompt).sum())
    batch = Batch(
        index=number,
        group_index=number,
        rollout_id=number,
        credit_key=number,
        reward=np.zeros(len(total)),
        truncated=np.zeros(len(total), np.bool_),
        prompt_length=prompt,
        response_length=total - prompt,
        tokens=tokens,
        mask=np.ones(num_response, np.uint8),
        rollout_log_probs=np.zeros(num_response, np.float32),
        version=np.zeros(num_response, np.int32),
    )
    return batch, np.split(number, np.cumsum([len(part) for part in per_micro])[:-1])


def set_up(options: dict[str, object], folder: Path, asked: argparse.Namespace) -> tuple[TrainBackend, TokenObjective]:
    registry = Registry()
    resolved = registry.resolve(groups.BACKENDS, asked.backend, where="backend")
    backend: TrainBackend = resolved.driver.build(bind(resolved, options, where="backend"))
    clip = registry.resolve(groups.LOSSES, "clip", where="algo.loss")
    objective = TokenObjective(
        loss=clip.driver.build(bind(clip, {}, where="algo.loss")), needs=frozenset(clip.driver.needs)
    )
    backend.setup(
        TrainerSetup(
            role="actor",
            rank=0,
            world_size=1,
            local_rank=0,
            rendezvous="",
            device=asked.device,
            model_path=folder,
            optimizer=OptimizerConfig(lr=1e-6),
            total_steps=100,
            seed=0,
        )
    )
    return backend, objective


def measure(options: dict[str, object], folder: Path, asked: argparse.Namespace) -> dict[str, object]:
    backend, objective = set_up(options, folder, asked)
    shape = ModelShape.from_config(SHAPES[asked.shape])
    step_s, score_s, work = [], [], 0.0
    for step in range(asked.warmup + asked.steps):
        if step == asked.warmup and asked.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        # New lengths each step, as in training: a kernel that is compiled for one length would show.
        batch, parts = make_batch(asked, shape.vocab, seed=step)
        plain = [pack_micro_batch(batch, part) for part in parts]
        started = time.perf_counter()
        scores = backend.forward_only(plain)
        scored = time.perf_counter()
        columns = TokenColumns(
            old_log_probs=np.concatenate([score.log_probs for score in scores]),
            advantages=np.random.default_rng(step).standard_normal(len(batch.mask)).astype(np.float32),
            loss_weight=np.full(len(batch.mask), 1 / len(batch.mask), np.float32),
        )
        packed = [pack_micro_batch(batch, part, columns=columns) for part in parts]
        with kernels() if asked.profile and step + 1 == asked.warmup else contextlib.nullcontext():
            report = backend.train_step(packed, objective)
        if report.skipped:
            raise RuntimeError(f"step {step} was skipped")
        if step >= asked.warmup:
            step_s.append(report.seconds)
            score_s.append(scored - started)
            work += 3 * float(shape.forward_flops(batch.total_length).sum())
    num_tokens = asked.micros * asked.tokens
    backend.close()
    speed = num_tokens / statistics.median(step_s)
    sizes = SHAPES[asked.shape]
    per_token = (
        6 * active_parameters(folder, sizes) + 12 * sizes["num_hidden_layers"] * sizes["hidden_size"] * asked.longest
    )
    return {
        "backend": asked.backend,
        "options": options,
        "shape": asked.shape,
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "tokens_per_step": num_tokens,
        "tokens_per_micro_batch": asked.tokens,
        "longest_sequence": asked.longest,
        "prompt_share": asked.prompt_share,
        "answers": asked.same_prompt,
        "step_s": round(statistics.median(step_s), 4),
        "step_s_spread": [round(min(step_s), 4), round(max(step_s), 4)],
        "train_tok_per_s": round(speed),
        "mfu": round(speed * per_token / PEAK_FLOPS, 3),
        "model_tflops": round(work / asked.steps / statistics.median(step_s) / 1e12, 1),
        "score_tok_per_s": round(num_tokens / statistics.median(score_s)),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if asked.device == "cuda" else None,
    }


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Prints what ran on the GPU meanwhile, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        started = time.perf_counter()
        yield
        torch.cuda.synchronize()
        lasted = time.perf_counter() - started
    ran = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in ran) / 1e6
    print(f"{lasted:.3f} s with the profiler, {busy:.3f} s of kernels")
    for event in ran[:30]:
        print(f"{event.self_device_time_total / 1e6:8.4f} s {event.count:6} {event.key[:150]}")


def num_parameters(folder: Path) -> int:
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as weights:
            count += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return count


def active_parameters(model: Path, sizes: dict[str, Any]) -> float:
    """Those that a token is computed with."""
    if "num_experts" not in sizes:
        return num_parameters(model)
    expert = 3 * sizes["hidden_size"] * sizes["moe_intermediate_size"]
    idle = sizes["num_experts"] - sizes["num_experts_per_tok"]
    return num_parameters(model) - sizes["num_hidden_layers"] * idle * expert


def add_sequences(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the packed sequences."""
    parser.add_argument("--longest", type=int, default=2048, help="longest sequence, in tokens")
    parser.add_argument("--shortest", type=int, help="shortest sequence; by default three quarters of the longest")
    parser.add_argument("--prompt-share", type=float, default=0.125, help="of the longest sequence that is prompt")
    parser.add_argument(
        "--answers", dest="same_prompt", type=int, default=1, help="sequences in a row that have the same prompt"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="fsdp")
    parser.add_argument(
        "--options", type=json.loads, action="append", help="of the backend, as JSON; several: one after the other"
    )
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--micros", type=int, default=2, help="micro-batches of a step")
    add_sequences(parser)
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=5, help="steps that are")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    if asked.profile and (asked.device != "cuda" or not asked.warmup):
        parser.error("--profile shows the last step of the warm-up on a GPU: --device cuda and --warmup 1 or more")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        write_model(folder, asked.shape, asked.device)
        for options in asked.options or [{}]:
            print(json.dumps(measure(options, folder, asked)), flush=True)
            gc.collect()
            torch.compiler.reset()
            if asked.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
