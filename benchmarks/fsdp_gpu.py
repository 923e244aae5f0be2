"""Speed and memory of backend fsdp's own training step on one GPU: a random model of Qwen3-0.6B's shape, clip loss.

    python benchmarks/fsdp_gpu.py [--shape tiny] [--device cpu] [--cases plain,checkpointing] ...

Each step is `TrainBackend.train_step` on --micros micro-batches of --tokens packed tokens: forward, log-probs, loss,
backward, gradient norm, AdamW. No rollouts are part of it. Prints one JSON line per case; tokens are prompt and
response, `model_tflops` counts three forwards of the model (nothing for recomputation), and a score is a forward
without gradients.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from slime_core import groups
from slime_core.batch.flops import ModelShape
from slime_core.batch.pack import pack_micro_batch
from slime_core.config.train import OptimizerConfig
from slime_core.contracts.backend import TrainBackend, TrainerSetup
from slime_core.objective.loss import TokenObjective
from slime_core.registry import Registry, bind
from slime_core.types.batch import Batch, TokenColumns

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
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 500,
        "tie_word_embeddings": True,
    },
}
CASES = {
    "plain": {},
    "unshared": {"share_prompts": False},
    "checkpointing": {"gradient_checkpointing": True},
    "compile": {"compile": True},
    "compile+checkpointing": {"compile": True, "gradient_checkpointing": True},
}


def write_model(folder: Path, shape: str, device: str) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPES[shape]), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def lengths_of(tokens: int, longest: int, order: np.random.Generator) -> np.ndarray:
    """Sequences of three quarters of `longest` and more, together exactly `tokens`."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(order.integers(longest * 3 // 4, longest + 1))))
    return np.array(lengths, np.int32)


def make_batch(asked: argparse.Namespace, vocab: int, seed: int) -> tuple[Batch, list[np.ndarray]]:
    """`asked.answers` neighbours have the same prompt, as a group's samples do."""
    order = np.random.default_rng(seed)
    per_micro = [lengths_of(asked.tokens, asked.longest, order) for _ in range(asked.micros)]
    total = np.concatenate(per_micro)
    prompt = np.clip(total - 1, 1, int(asked.longest * asked.prompt_share)).astype(np.int32)
    starts = np.cumsum(total) - total
    tokens = order.integers(vocab, size=int(total.sum())).astype(np.int32)
    for i in range(len(total)):
        first = i - i % asked.answers
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


def measure(case: str, folder: Path, asked: argparse.Namespace) -> dict[str, object]:
    registry = Registry()
    resolved = registry.resolve(groups.BACKENDS, "fsdp", where="backend")
    backend: TrainBackend = resolved.driver.build(bind(resolved, CASES[case], where="backend"))
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
    shape = ModelShape.from_config(SHAPES[asked.shape])
    step_s, score_s, work = [], [], 0.0
    for step in range(asked.warmup + asked.steps):
        if step == asked.warmup and asked.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        # New lengths each step, as in training: a kernel that is compiled for one length would show.
        batch, parts = make_batch(asked, shape.vocab, seed=step)
        plain = [pack_micro_batch(batch, part) for part in parts]
        started = time.perf_counter()
        scores = backend.score(plain)
        scored = time.perf_counter()
        columns = TokenColumns(
            old_log_probs=np.concatenate([score.log_probs for score in scores]),
            advantages=np.random.default_rng(step).standard_normal(len(batch.mask)).astype(np.float32),
            loss_weight=np.full(len(batch.mask), 1 / len(batch.mask), np.float32),
        )
        packed = [pack_micro_batch(batch, part, columns=columns) for part in parts]
        report = backend.train_step(packed, objective)
        if report.skipped:
            raise RuntimeError(f"step {step} was skipped")
        if step >= asked.warmup:
            step_s.append(report.seconds)
            score_s.append(scored - started)
            work += 3 * float(shape.forward_flops(batch.total_length).sum())
    num_tokens = asked.micros * asked.tokens
    backend.close()
    return {
        "case": case,
        "shape": asked.shape,
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "tokens_per_step": num_tokens,
        "tokens_per_micro_batch": asked.tokens,
        "longest_sequence": asked.longest,
        "prompt_share": asked.prompt_share,
        "answers": asked.answers,
        "step_s": round(statistics.median(step_s), 4),
        "step_s_spread": [round(min(step_s), 4), round(max(step_s), 4)],
        "train_tok_per_s": round(num_tokens / statistics.median(step_s)),
        "model_tflops": round(work / asked.steps / statistics.median(step_s) / 1e12, 1),
        "score_tok_per_s": round(num_tokens / statistics.median(score_s)),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if asked.device == "cuda" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", default="plain,checkpointing,compile,compile+checkpointing", help=", ".join(CASES))
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--micros", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--longest", type=int, default=2048, help="longest sequence, in tokens")
    parser.add_argument("--prompt-share", type=float, default=0.125, help="of the longest sequence that is prompt")
    parser.add_argument("--answers", type=int, default=1, help="sequences in a row that have the same prompt")
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=5, help="steps that are")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        write_model(folder, asked.shape, asked.device)
        for case in asked.cases.split(","):
            print(json.dumps(measure(case, folder, asked)), flush=True)
            gc.collect()
            torch.compiler.reset()
            if asked.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
