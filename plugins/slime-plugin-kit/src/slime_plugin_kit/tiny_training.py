"""Steps of a backend on the tiny model: a batch, an objective that needs every reduction, and transformers' gradients.

Legend: S samples, M response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from slime_core.algorithm.loss import TokenObjective
from slime_core.algorithm.loss_weights import loss_weights
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.backend import Layout, TrainBackend
from slime_core.contracts.loss import LossInputs, LossOutput, PolicyLoss, Segments
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import TrainerSetup
from slime_core.types.batch import Batch, Float64, TokenColumns
from slime_core.types.microbatch import MicroBatch
from slime_core.types.weights import Bucket
from slime_core.workers.buckets import buckets_of
from slime_plugin_kit.objectives import EVERY_NEED
from slime_plugin_kit.tiny_model import ALPHABET, FIRST_TOKEN, log_probs_of, unpacked

TEMPERATURE: Final = 0.7
ENTROPY_COEF: Final = 0.1
PROMPTS: Final = (4, 4, 4, 7, 7, 1, 9, 9)
"""Tokens; equal neighbours have the same prompt."""
RESPONSES: Final = (5, 9, 0, 6, 1, 8, 13, 3)
MASKED: Final = 3
"""The sample that is fully masked."""
WHOLE: Final = (tuple(range(len(PROMPTS))),)
SPLITS: Final = (
    ((0, 1), (2,), (3, 4, 5), (6, 7)),
    ((7, 0, 5), (), (3,), (6, 2, 1, 4)),
)
SGD: Final = OptimizerConfig(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0)
"""What a step takes off the weights is the gradient."""
OVERFLOWING: Final = OptimizerConfig(optimizer="sgd", lr=3e38, weight_decay=0.0, clip_grad=0.0)
"""With a loss that is LARGE times as large, a step's weights are beyond float32, and its gradient is not."""
LARGE: Final = 1e6
ADAM: Final = OptimizerConfig(lr=0.01, lr_decay_style="linear", lr_warmup_iters=2, clip_grad=0.5)
TOTAL_STEPS: Final = 6


class SequenceLikelihood(PolicyLoss):
    """-A exp(mean log-prob of the sample) - 0.3 log-prob: it reduces over samples, and every token counts."""

    def __init__(self, poison: float = 0.0, factor: float = 1.0) -> None:
        self._poison = poison
        self._factor = factor

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        assert inputs.log_probs is not None
        assert inputs.advantages is not None
        log_probs = torch.where(inputs.mask, inputs.log_probs, 0.0)
        count = segments.seq_sum(inputs.mask.to(log_probs.dtype)).clamp(min=1.0)
        likelihood = segments.expand((segments.seq_sum(log_probs) / count).exp())
        values = -inputs.advantages * likelihood - 0.3 * log_probs
        return LossOutput(values=self._factor * values + self._poison, metrics={"likelihood": likelihood.detach()})


class TooLarge(SequenceLikelihood):
    """Asks torch for more memory than there is if a micro-batch has more than `most` response tokens: in the forward, or in the
    backward."""

    def __init__(self, most: int, *, in_backward: bool) -> None:
        super().__init__()
        self._most, self._in_backward = most, in_backward

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        found = super().__call__(inputs, segments)
        if len(found.values) > self._most:
            if not self._in_backward:
                ask_for_too_much()
            found.values.register_hook(ask_for_too_much)  # type: ignore[no-untyped-call]
        return found


def ask_for_too_much(gradient: Tensor | None = None) -> None:
    torch.empty(2**60, dtype=torch.uint8)


class SquaredError(PolicyLoss):
    """The loss of a critic."""

    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        assert inputs.values is not None
        assert inputs.returns is not None
        return LossOutput(values=(torch.where(inputs.mask, inputs.values - inputs.returns, 0.0)).square())


def objective_of(poison: float = 0.0, factor: float = 1.0) -> TokenObjective:
    return objective_with(SequenceLikelihood(poison, factor))


def objective_with(loss: PolicyLoss) -> TokenObjective:
    return TokenObjective(loss=loss, needs=EVERY_NEED, entropy_coef=ENTROPY_COEF)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """The same in every process."""

    batch: Batch
    columns: TokenColumns

    @classmethod
    def make(cls) -> TrainingBatch:
        rng = np.random.default_rng(21)
        tokens: list[int] = []
        prompt: list[int] = []
        top = FIRST_TOKEN + len(ALPHABET)
        for number, (length, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            if number == 0 or length != PROMPTS[number - 1]:
                prompt = rng.integers(FIRST_TOKEN, top, length).tolist()
            tokens += [*prompt, *rng.integers(FIRST_TOKEN, top, response).tolist()]
        mask = (rng.random(sum(RESPONSES)) < 0.8).astype(np.uint8)
        of_sample = np.repeat(np.arange(len(PROMPTS)), RESPONSES)
        mask[of_sample == MASKED] = 0
        numbers = np.arange(len(PROMPTS), dtype=np.int64)
        batch = Batch(
            index=numbers,
            group_index=numbers // 3,
            rollout_id=numbers,
            credit_key=numbers // 3,
            reward=np.ones(len(PROMPTS)),
            truncated=np.zeros(len(PROMPTS), np.bool_),
            prompt_length=np.array(PROMPTS, np.int32),
            response_length=np.array(RESPONSES, np.int32),
            tokens=np.array(tokens, np.int32),
            mask=mask,
            rollout_log_probs=np.zeros(len(mask), np.float32),
            version=np.zeros(len(mask), np.int32),
        )
        steps = np.zeros(len(PROMPTS), np.int64)
        columns = TokenColumns(
            advantages=rng.normal(size=len(mask)).astype(np.float32),
            returns=rng.normal(size=len(mask)).astype(np.float32),
            loss_weight=loss_weights(batch, steps, Aggregation.SEQ_MEAN, max(RESPONSES)),
        )
        return cls(batch=batch, columns=columns)

    def micros(self, split: Sequence[Sequence[int]] = WHOLE) -> list[MicroBatch]:
        return [
            pack_micro_batch(self.batch, np.array(samples, np.int64), columns=self.columns, temperature=TEMPERATURE)
            for samples in split
        ]

    def by_transformers(self, model: Any) -> tuple[Tensor, Tensor]:
        """(M,) log-probs and entropies of the response tokens."""
        log_probs, entropies = [], []
        for sample in range(self.batch.num_samples):
            start, end = self.batch.token_offsets[sample : sample + 2]
            tokens = self.batch.tokens[start:end].tolist()
            length = PROMPTS[sample]
            chosen, entropy = log_probs_of(model, tokens[:length], tokens[length:], TEMPERATURE)
            log_probs.append(chosen)
            entropies.append(entropy)
        return torch.cat(log_probs), torch.cat(entropies)

    def gradients_by_transformers(self, model: Any) -> dict[str, Tensor]:
        """Gradients of the step's loss, which is computed here a second way, by Hugging Face names."""
        log_probs, entropy = self.by_transformers(model)
        mask = torch.from_numpy(self.batch.mask.astype(np.bool_))
        weight, advantages = (
            torch.from_numpy(column.astype(np.float64))
            for column in (self.columns.loss_weight, self.columns.advantages)
            if column is not None
        )
        loss = torch.zeros((), dtype=torch.float64)
        for sample in range(self.batch.num_samples):
            start, end = self.batch.response_offsets[sample : sample + 2]
            trained = mask[start:end]
            if not trained.any():
                continue
            of_sample = log_probs[start:end][trained]
            likelihood = of_sample.mean().exp()
            values = -advantages[start:end][trained] * likelihood - 0.3 * of_sample
            values = values - ENTROPY_COEF * entropy[start:end][trained]
            loss = loss + (weight[start:end][trained] * values).sum()
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return {name: parameter.grad for name, parameter in model.named_parameters()}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a backend under test runs."""

    model: Path
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""

    def setup(self, **options: Any) -> TrainerSetup:
        given: dict[str, Any] = {
            "role": "actor",
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.rank,
            "rendezvous": self.rendezvous,
            "device": "cpu",
            "model_path": self.model,
            "optimizer": SGD,
            "total_steps": TOTAL_STEPS,
            "seed": 5,
        }
        return TrainerSetup(**(given | options))


@dataclass
class Opened:
    backend: TrainBackend
    layout: Layout
    reports: list[Any] = field(default_factory=list)

    def buckets(self, version: int = 0, bucket_bytes: int = 4096) -> Iterator[Bucket | None]:
        """Its export as engines get it."""
        return buckets_of(self.backend.export_weights(), version=version, bucket_bytes=bucket_bytes)

    def weights(self, version: int = 0, bucket_bytes: int = 4096) -> dict[str, Tensor]:
        """What it exports; empty on every rank but the first."""
        return unpacked(list(self.buckets(version, bucket_bytes)))

    def scores(
        self, training: TrainingBatch, split: Sequence[Sequence[int]] = WHOLE, **asked: Any
    ) -> dict[str, Float64]:
        """(M,) columns by name, NaN where another rank holds the token."""
        columns: dict[str, Float64] = {}
        batch = training.batch
        for samples, scores in zip(split, self.backend.forward_only(training.micros(split), **asked), strict=True):
            rows = batch.response_rows(np.array(samples, np.int64))
            held = rows if scores.rows is None else rows[scores.rows]
            for name, values in scores.present().items():
                column = columns.setdefault(name, np.full(len(batch.mask), np.nan))
                assert len(values) == len(held), f"{len(values)} {name} for {len(held)} response tokens"
                column[held] = values
        return columns


@contextmanager
def opened(backend: TrainBackend, place: Place, **options: Any) -> Iterator[Opened]:
    """A backend after its setup, closed at the end."""
    layout = backend.setup(place.setup(**options))
    try:
        yield Opened(backend, layout)
    finally:
        backend.close()
