"""Models: what the server needs of whatever trains and samples. A model has weights, gradients and an optimizer of its own.

Calls are made one at a time, in a thread of their own, but those of `Sampler`, which may be made beside any other call. Errors
of the kind `SlimeError` are the client's or concern one request alone; after any other error the server ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slime_core.types.batch import Float32
from slime_core.types.completion import Completion, SamplingParams
from slime_session import Datum
from slime_session.loss_choice import Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The one model that all others start from."""

    name: str
    """As clients name it."""
    folder: Path
    """With weights and tokenizer."""
    arch: str
    vocab_size: int
    max_length: int
    """Tokens of prompt and response at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model trains."""

    rank: int | None
    """Of its LoRA adapter; None: all weights of the base."""
    seed: int = 0
    """Of the adapter's first weights."""
    attention: bool = True
    mlp: bool = True
    unembedding: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """Of one optimizer step: AdamW with decoupled weight decay."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float
    """Largest global norm of the gradient; 0: it is never clipped."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """Of a prompt of T tokens: log-probs in nats at temperature 1, of its tokens but the first."""

    log_probs: Float32
    """(T - 1,)"""
    top_ids: npt.NDArray[np.int32] | None = None
    """(T - 1, k) the likeliest tokens, the likeliest first; None: not requested."""
    top_log_probs: Float32 | None = None
    """(T - 1, k)"""

    def last(self, number: int) -> PromptScores:
        """Of the last `number` tokens."""
        start = len(self.log_probs) - number
        return PromptScores(
            log_probs=self.log_probs[start:],
            top_ids=None if self.top_ids is None else self.top_ids[start:],
            top_log_probs=None if self.top_log_probs is None else self.top_log_probs[start:],
        )


class SamplerWeights(Protocol):
    """Weights that can be sampled from, as they were when they were saved."""

    def drop(self) -> None:
        """Frees their memory. Nothing samples from them any more."""


class Models(Protocol):
    """See the module's rules."""

    @property
    def base(self) -> BaseModel: ...

    @property
    def whole(self) -> bool:
        """True: it trains all weights of one model. False: any number of LoRA adapters."""

    @property
    def draws_by_seed(self) -> bool:
        """The seeds of `start_sampling` alone decide what is drawn."""

    @property
    def max_models(self) -> int:
        """Models at a time."""

    @property
    def max_weights(self) -> int:
        """`SamplerWeights` at a time, the base not counted without `base_weights`; at least 1."""

    @property
    def base_weights(self) -> Path | None:
        """The base as a folder for `open_weights`; None: the base can be sampled from beside all others."""

    def create(self, name: str, spec: ModelSpec) -> None:
        """A model that computes what the base does. ConfigError for a spec that it cannot train."""

    def load(self, name: str, spec: ModelSpec, folder: Path, *, optimizer: bool) -> None:
        """A model with the weights that `save` wrote, and with `optimizer` its optimizer state; without, a new optimizer."""

    def remove(self, name: str) -> None:
        """Frees its memory."""

    def forward(self, name: str, datums: Sequence[Datum]) -> Float32:
        """(M,) log-probs of all response tokens, in the order of the datums, at temperature 1."""

    def forward_backward(self, name: str, datums: Sequence[Datum], loss: Loss) -> Float32:
        """Adds the gradient of the sum over tokens of loss weight x loss to the model's gradients; returns what `forward`
        returns."""

    def optim_step(self, name: str, adam: AdamSettings) -> float:
        """One optimizer step with the gradients since the last; returns their norm before clipping. Without gradients it is
        a step with gradients of zero."""

    def save(self, name: str, folder: Path, *, optimizer: bool) -> Callable[[], None]:
        """Takes its weights as they are now, and with `optimizer` its optimizer state. The function writes what is not written
        yet into `folder`, which does not exist before, in any thread and beside other calls."""

    def open_weights(self, folder: Path) -> SamplerWeights:
        """The weights that `save` wrote without `optimizer`, for sampling. One of `max_weights` that are open at a time."""

    def start_sampling(
        self, weights: SamplerWeights | None, prompt: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> Future[list[Completion]]:
        """A completion for each seed, whose draws depend on that seed alone. `weights`: None: the base. Cancelling the
        future ends the work."""

    def prompt_scores(self, weights: SamplerWeights | None, prompt: Sequence[int], top_k: int) -> Future[PromptScores]:
        """`top_k`: 0: none."""

    def close(self) -> None: ...
