"""Makes the arithmetic example's model and data: no downloads.

The task is adding numbers of three digits without carries. The model writes the digits of the sum from the units up, then
the answer in a box: `312+457=` is worked as `9,6,7\\boxed{769}`. A short supervised warm-up on worked examples teaches the
form and a little of the arithmetic; reinforcement learning, which sees only whether the box is right, has to teach the rest.

Run by `slime run` when something is missing, or by hand: python prepare.py [--seed N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from slime_core import groups
from slime_core.batch.pack import pack_micro_batch
from slime_core.config.train import OptimizerConfig
from slime_core.contracts.backend import TrainBackend, TrainerSetup
from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments
from slime_core.model_folder import load_tokenizer
from slime_core.new_model import ModelSizes, new_model
from slime_core.objective.loss import TokenObjective
from slime_core.registry import Registry, bind
from slime_core.types.batch import Batch, TokenColumns

NUM_HELD_OUT = 500
BATCH = 128
SIZES = ModelSizes(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, max_length=64)
INITIALIZER_RANGE = 0.08
ENOUGH = 0.2
"""Chance of writing a worked answer exactly at which the warm-up ends; greedy answers are right more often than that."""
MAX_STEPS = 300


def carries(a: int, b: int) -> bool:
    return any(int(x) + int(y) > 9 for x, y in zip(str(a), str(b), strict=True))


def split(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Training and held-out problems. A problem and its mirror image (b+a) are never on different sides."""
    problems = [(a, b) for a in range(100, 1000) for b in range(100, 1000) if not carries(a, b)]
    shuffled = [problems[number] for number in np.random.default_rng(seed).permutation(len(problems))]
    held_out = shuffled[:NUM_HELD_OUT]
    taken = {frozenset(pair) for pair in held_out}
    return [pair for pair in shuffled[NUM_HELD_OUT:] if frozenset(pair) not in taken], held_out


def worked(a: int, b: int) -> str:
    """The answer with its working."""
    return f"{','.join(reversed(str(a + b)))}\\boxed{{{a + b}}}"


def write_rows(path: Path, pairs: list[tuple[int, int]]) -> None:
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_worked(path: Path, pairs: list[tuple[int, int]]) -> None:
    """What the warm-up learns from, for runs of supervised fine-tuning."""
    rows = [{"prompt": f"{a}+{b}=", "label": worked(a, b)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class NegativeLogLikelihood(PolicyLoss):
    """Supervised learning as a loss of the kernel's kind: per token, aggregated by the loss weights."""

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        assert inputs.log_probs is not None
        return LossOutput(values=-inputs.log_probs)


def worked_examples(pairs: list[tuple[int, int]], folder: Path, seed: int) -> Iterator[tuple[Batch, TokenColumns]]:
    """Batches of worked examples for ever, every token of an answer with equal weight."""
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    order = np.random.default_rng(seed)
    while True:
        chosen = [pairs[number] for number in order.integers(len(pairs), size=BATCH)]
        prompts = [tokenizer.encode(f"{a}+{b}=") for a, b in chosen]
        answers = [[*tokenizer.encode(worked(a, b)), tokenizer.eos_token_id] for a, b in chosen]
        response_length = np.array([len(answer) for answer in answers], np.int32)
        number = np.arange(BATCH)
        batch = Batch(
            index=number,
            group_index=number,
            rollout_id=number,
            credit_key=number,
            reward=np.full(BATCH, np.nan),
            truncated=np.zeros(BATCH, np.bool_),
            prompt_length=np.array([len(prompt) for prompt in prompts], np.int32),
            response_length=response_length,
            tokens=np.concatenate([[*p, *a] for p, a in zip(prompts, answers, strict=True)]).astype(np.int32),
            mask=np.ones(response_length.sum(), np.uint8),
            rollout_log_probs=np.zeros(response_length.sum(), np.float32),
            version=np.zeros(response_length.sum(), np.int32),
        )
        weight = np.full(response_length.sum(), 1 / response_length.sum(), np.float32)
        yield batch, TokenColumns(loss_weight=weight)


def exact_chance(batch: Batch, log_probs: np.ndarray) -> float:
    """How likely sampling is to write the worked answer exactly, averaged over the batch."""
    return float(np.exp(batch.sample_sums(log_probs)).mean())


def warm_up(start: Path, target: Path, pairs: list[tuple[int, int]], *, enough: float, lr: float, seed: int) -> None:
    """Trains through the backend's own contract until answers begin to be right; writes the model with its tokenizer."""
    registry = Registry()
    resolved = registry.resolve(groups.BACKENDS, "fsdp", where="backend")
    backend: TrainBackend = resolved.driver.build(bind(resolved, {}, where="backend"))
    optimizer = OptimizerConfig(lr=lr, adam_beta2=0.95, weight_decay=0.01, lr_warmup_iters=10)
    backend.setup(
        TrainerSetup(
            role="actor", rank=0, world_size=1, local_rank=0, rendezvous="", device="cpu", model_path=start,
            optimizer=optimizer, total_steps=MAX_STEPS, seed=seed,
        )
    )  # fmt: skip
    objective = TokenObjective(loss=NegativeLogLikelihood(), needs=frozenset(), report_entropy=False)
    for step, (batch, columns) in enumerate(itertools.islice(worked_examples(pairs, start, seed), MAX_STEPS)):
        micro = pack_micro_batch(batch, np.arange(BATCH), columns=columns)
        if step % 2 == 0:
            chance = exact_chance(batch, backend.score([micro])[0].log_probs)
            if step % 20 == 0 or chance >= enough:
                print(f"warm-up step {step}: exactly right with probability {chance:.3f}", flush=True)
            if chance >= enough:
                break
        backend.train_step([micro], objective)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    backend.save_hf(target)
    load_tokenizer(start, trust_remote_code=False).save_pretrained(target)
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=2, help="of the weights, the split and the warm-up")
    parser.add_argument("--enough", type=float, default=ENOUGH, help="chance of an exact answer that ends the warm-up")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "generated")
    asked = parser.parse_args()

    asked.folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split(asked.seed)
    write_rows(asked.folder / "train.jsonl", train)
    write_rows(asked.folder / "test.jsonl", held_out)
    write_worked(asked.folder / "worked.jsonl", train)
    start = asked.folder / "random"
    shutil.rmtree(start, ignore_errors=True)
    new_model(
        start,
        "qwen3",
        SIZES,
        alphabet="0123456789+=,}",
        tokens=["\\boxed{"],
        seed=asked.seed,
        initializer_range=INITIALIZER_RANGE,
    )
    warm_up(start, asked.folder / "base", train, enough=asked.enough, lr=asked.lr, seed=asked.seed)


if __name__ == "__main__":
    main()
