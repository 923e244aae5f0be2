"""Makes an example's model and data: no downloads. Every example is a run file and one Python file with a `TASK`.

A small model with random weights and a tokenizer of its own learns from worked examples of the task, by supervised
learning, until it writes one exactly with a chance of `enough`. That teaches the form and a little of the substance;
reinforcement learning, which sees only rewards, has to teach the rest. Written, by default into `generated` beside the
task: random (the model before), base (after), train.jsonl, test.jsonl (held out), worked.jsonl for runs of supervised
fine-tuning, where worked examples are a prompt and one answer; further files that the task has; and with --teacher a
model that was trained on.

Run by `slime run` when something is missing, or by hand: python warm_start.py TASK.py [--seed N] [--folder DIR] ...
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
from transformers import PreTrainedTokenizerBase

from slime_core import groups
from slime_core.algorithm.loss import TokenObjective
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.backend import TrainBackend
from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import TrainerSetup
from slime_core.data.model_folder import copy_processor, load_tokenizer
from slime_core.registry import Registry, bind
from slime_core.types.batch import Batch, TokenColumns
from slime_core.types.batch_images import BatchImages
from slime_core.types.image import Image
from slime_models.media.image_processor import ImageProcessor
from slime_models.media.pack_images import PixelCache
from slime_models.new_model import ModelSizes, new_model
from slime_models.new_vision_model import VisionSizes, new_vision_model

BATCH: Final = 128
INITIALIZER_RANGE: Final = 0.08
JUDGED_EVERY: Final = 2
PRINTED_EVERY: Final = 20

Row: TypeAlias = dict[str, Any]
"""A row of data: prompt, label, and whatever the example's reward or generator reads."""
Worked: TypeAlias = Sequence[tuple[str, bool]]
"""A worked example: pieces of text, each with whether the model learns to write it. The first piece is the prompt; later ones
that it does not write are a tool's or another agent's. The end token follows, and `<end>` is one anywhere."""


class Task(Protocol):
    """The attributes of a task: the object TASK in the Python file of an example."""

    alphabet: str
    """Characters, one token each."""
    tokens: Sequence[str]
    """Longer pieces that are one token."""
    chat_template: str | None
    """For prompts that are messages."""
    sizes: ModelSizes
    enough: float
    """Chance of writing a worked example exactly, averaged over them, at which the warm start ends."""
    lr: float
    max_steps: int
    """An error if it takes more."""

    def rows(self, seed: int) -> tuple[list[Row], list[Row]]:
        """Training and held-out rows."""

    def worked(self, rows: Sequence[Row], seed: int) -> list[Worked]:
        """Worked examples of training rows: one for each, or more."""


@runtime_checkable
class SeesImages(Protocol):
    """A task whose rows have `images`, names of files. Worked examples are one for each row, and have as many image tokens
    as the images have features."""

    vision: VisionSizes

    def images(self, row: Row) -> Mapping[str, bytes]:
        """The files that a row names, by their names."""


@runtime_checkable
class HasFiles(Protocol):
    """A task with more data than questions, such as a corpus."""

    def files(self) -> Mapping[str, Iterable[Row]]:
        """Rows by the names of their files."""


def load_task(path: Path) -> Task:
    """The TASK of a Python file. SystemExit names the attributes that it lacks."""
    spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{path}: no such Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    task = getattr(module, "TASK", None)
    required = [*Task.__annotations__, Task.rows.__name__, Task.worked.__name__]
    if lacking := [name for name in required if not hasattr(task, name)]:
        raise SystemExit(f"{path}: TASK lacks {', '.join(lacking)}. It must have {', '.join(required)}.")
    return task  # type: ignore[no-any-return]


class NegativeLogLikelihood(PolicyLoss):
    """Supervised learning as a loss of the kernel's kind: per token, aggregated by the loss weights."""

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        assert inputs.log_probs is not None
        return LossOutput(values=-inputs.log_probs)


def encoded(worked: Worked, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], list[int]]:
    """Prompt, response, and mask of the response (1: the model writes it)."""
    pieces = [(tokenizer.encode(text, add_special_tokens=False), written) for text, written in worked]
    assert tokenizer.eos_token_id is not None
    pieces.append(([tokenizer.eos_token_id], pieces[-1][1]))
    is_prompt = [not written for _, written in pieces]
    start = is_prompt.index(False)
    prompt = [token for tokens, _ in pieces[:start] for token in tokens]
    response = [token for tokens, _ in pieces[start:] for token in tokens]
    return prompt, response, [int(written) for tokens, written in pieces[start:] for _ in tokens]


def batches(
    worked: Sequence[Worked], tokenizer: PreTrainedTokenizerBase, seed: int, *, images: Sequence[Sequence[bytes]] = ()
) -> Iterator[tuple[Batch, TokenColumns]]:
    """Yields batches without end; every trained token has the same weight. `images`: of each worked example, or empty."""
    order = np.random.default_rng(seed)
    while True:
        numbers = order.integers(len(worked), size=BATCH)
        chosen = [encoded(worked[number], tokenizer) for number in numbers]
        response_length = np.array([len(response) for _, response, _ in chosen], np.int32)
        mask = np.concatenate([mask for _, _, mask in chosen]).astype(np.uint8)
        number = np.arange(BATCH)
        batch = Batch(
            index=number,
            group_index=number,
            rollout_id=number,
            credit_key=number,
            reward=np.full(BATCH, np.nan),
            truncated=np.zeros(BATCH, np.bool_),
            prompt_length=np.array([len(prompt) for prompt, _, _ in chosen], np.int32),
            response_length=response_length,
            tokens=np.concatenate([[*prompt, *response] for prompt, response, _ in chosen]).astype(np.int32),
            mask=mask,
            rollout_log_probs=np.zeros(response_length.sum(), np.float32),
            version=np.zeros(response_length.sum(), np.int32),
            images=BatchImages.of([[Image(data=data) for data in images[n]] for n in numbers]) if images else None,
        )
        yield batch, TokenColumns(loss_weight=(mask / mask.sum()).astype(np.float32))


def exact_chance(batch: Batch, log_probs: np.ndarray) -> float:
    """Probability of sampling the worked example exactly, averaged over the batch."""
    return float(np.exp(batch.sample_sums(log_probs * batch.mask)).mean())


def warm_up(
    task: Task,
    start: Path,
    stages: Mapping[Path, float],
    worked: Sequence[Worked],
    images: Sequence[Sequence[bytes]],
    *,
    seed: int,
) -> None:
    """Trains with a backend of slime. Saves the model and its tokenizer to each folder of `stages` when the probability of
    sampling a worked example exactly has reached the number beside it."""
    registry = Registry()
    resolved = registry.resolve(groups.BACKENDS, "fsdp", where="backend")
    backend: TrainBackend = resolved.driver.build(bind(resolved, {}, where="backend"))
    optimizer = OptimizerConfig(lr=task.lr, adam_beta2=0.95, weight_decay=0.01, lr_warmup_iters=10)
    backend.setup(
        TrainerSetup(
            role="actor", rank=0, world_size=1, local_rank=0, rendezvous="", device="cpu", model_path=start,
            optimizer=optimizer, total_steps=task.max_steps, seed=seed,
        )
    )  # fmt: skip
    tokenizer = load_tokenizer(start, trust_remote_code=False)
    objective = TokenObjective(loss=NegativeLogLikelihood(), needs=frozenset(), report_entropy=False)
    left = dict(stages)
    pixels = PixelCache(lambda: ImageProcessor(start))
    made = itertools.islice(batches(worked, tokenizer, seed, images=images), task.max_steps)
    for step, (batch, columns) in enumerate(made):
        micro = pack_micro_batch(batch, np.arange(BATCH), columns=columns, pixels=pixels)
        if step % JUDGED_EVERY == 0:
            chance = exact_chance(batch, backend.forward_only([micro])[0].log_probs)
            reached = [folder for folder, enough in left.items() if chance >= enough]
            if step % PRINTED_EVERY == 0 or reached:
                print(f"warm-up step {step}: exactly right with probability {chance:.3f}", flush=True)
            for folder in reached:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                backend.save_hf(folder)
                tokenizer.save_pretrained(folder)
                copy_processor(start, folder)
                del left[folder]
            if not left:
                break
        backend.train_step([micro], objective)
    backend.close()
    if left:
        raise SystemExit(
            f"After {task.max_steps} steps the probability is {chance:.3f}, and {min(left.values())} is required."
        )


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_images(task: SeesImages, folder: Path, row: Row) -> list[bytes]:
    files = task.images(row)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return [files[name] for name in row["images"]]


def make(task: Task, folder: Path, *, seed: int, teacher: float | None = None, num_heads: int | None = None) -> None:
    """Writes the model and the data files that the run files of the task name. `num_heads`: attention heads, two for each
    head of keys; None: the task's."""
    sizes = task.sizes
    if num_heads is not None:
        sizes = replace(sizes, num_heads=num_heads, num_kv_heads=max(1, num_heads // 2))
    train, held_out = task.rows(seed)
    trained = {json.dumps([row["prompt"], row.get("images")]) for row in train}
    if seen := [row["prompt"] for row in held_out if json.dumps([row["prompt"], row.get("images")]) in trained]:
        raise SystemExit(f"{len(seen)} held-out prompts are training prompts too, such as {seen[0]!r}.")
    worked = task.worked(train, seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "test.jsonl", held_out)
    if all(len(example) == 2 for example in worked):
        write_rows(
            folder / "worked.jsonl", ({"prompt": prompt, "label": answer} for (prompt, _), (answer, _) in worked)
        )
    if isinstance(task, HasFiles):
        for name, rows in task.files().items():
            write_rows(folder / name, rows)
    start = folder / "random"
    shutil.rmtree(start, ignore_errors=True)
    common: dict[str, Any] = {
        "alphabet": task.alphabet,
        "tokens": task.tokens,
        "chat_template": task.chat_template,
        "seed": seed,
        "initializer_range": INITIALIZER_RANGE,
    }
    images: list[list[bytes]] = []
    if isinstance(task, SeesImages):
        new_vision_model(start, sizes, task.vision, **common)
        images = [write_images(task, folder, row) for row in [*train, *held_out]][: len(train)]
    else:
        new_model(start, "qwen3", sizes, **common)
    stages = {folder / "base": task.enough}
    if teacher is not None:
        stages[folder / "teacher"] = teacher
    warm_up(task, start, stages, worked, images, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path, help="Python file with a TASK")
    parser.add_argument("--seed", type=int, default=2, help="of the weights, the data and the warm-up")
    parser.add_argument("--folder", type=Path, help="by default `generated` beside the task")
    parser.add_argument("--num-heads", type=int, help="attention heads; by default the task's")
    parser.add_argument("--teacher", type=float, help="train further, to this probability, and save `teacher` too")
    asked = parser.parse_args()
    folder = asked.folder or asked.task.parent / "generated"
    make(load_task(asked.task), folder, seed=asked.seed, teacher=asked.teacher, num_heads=asked.num_heads)


if __name__ == "__main__":
    main()
