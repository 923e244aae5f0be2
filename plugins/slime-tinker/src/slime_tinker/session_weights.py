"""SessionWeights: `Models` over a slime session, of one model that trains all weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slime_core.errors import ConfigError
from slime_core.types.batch import Float32
from slime_core.types.completion import Completion, SamplingParams
from slime_session import Datum, TrainingSession
from slime_session.loss_choice import Loss
from slime_tinker.models import AdamSettings, ModelSpec, PromptScores, SamplerWeights
from slime_tinker.session_adapters import PromptScorer, base_model, draws_by_seed, parts_of, require_taken


@dataclass(frozen=True, slots=True, eq=False)
class EngineWeights:
    """What the engines sample with, until others are opened."""

    def drop(self) -> None:
        """They have one set of weights, and keep it until the next."""


class SessionWeights:
    """See `slime_tinker.models.Models`."""

    whole = True
    max_models = 1
    max_weights = 1

    def __init__(self, session: TrainingSession, *, name: str) -> None:
        """`name`: of the base model, for clients."""
        self._session = session
        require_all_weights(session)
        self.draws_by_seed = draws_by_seed(session.run)
        self.base = base_model(Path(session.run.config.model.hf_checkpoint), name)
        self.base_weights: Path | None = session.folder / "base_weights"
        self._scorer = PromptScorer(session)
        # While the trainers have them: no later weight update can send them.
        session.save_weights(self.base_weights)
        self._is_new = True

    def create(self, name: str, spec: ModelSpec) -> None:
        if not self._is_new:
            self._session.restart()
        self._is_new = False

    def load(self, name: str, spec: ModelSpec, folder: Path, *, optimizer: bool) -> None:
        self._is_new = False
        self._session.load_state(folder, optimizer=optimizer)

    def remove(self, name: str) -> None:
        """Its weights and gradients stay in memory until the next model takes their place."""

    def forward(self, name: str, datums: Sequence[Datum]) -> Float32:
        return np.concatenate([self._session.forward(self._session.batch(part)) for part in parts_of(datums)])

    def forward_backward(self, name: str, datums: Sequence[Datum], loss: Loss) -> Float32:
        session = self._session
        found = [session.forward_backward(session.batch(part), loss=loss) for part in parts_of(datums)]
        return np.concatenate([gradients.log_probs for gradients in found])

    def optim_step(self, name: str, adam: AdamSettings) -> float:
        report = self._session.optim_step(
            adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, grad_clip=adam.grad_clip
        )
        require_taken(report)
        return report.grad_norm

    def save(self, name: str, folder: Path, *, optimizer: bool) -> Callable[[], None]:
        """At once: there is no other model that would have to wait."""
        if optimizer:
            self._session.save_state(folder)
        else:
            self._session.save_weights(folder)
        return lambda: None

    def open_weights(self, folder: Path) -> SamplerWeights:
        self._session.load_weights(folder)
        return EngineWeights()

    def start_sampling(
        self, weights: SamplerWeights | None, prompt: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> Future[list[Completion]]:
        return self._session.start_generating([prompt] * len(seeds), sampling, seeds=seeds)

    def prompt_scores(self, weights: SamplerWeights | None, prompt: Sequence[int], top_k: int) -> Future[PromptScores]:
        return self._scorer.start(None, prompt, top_k)

    def close(self) -> None:
        self._scorer.close()
        self._session.close()


def require_all_weights(session: TrainingSession) -> None:
    """ConfigError for a run that trains adapters."""
    options = session.run.backend.config
    for key in ("max_adapters", "lora_rank", "lora_adapter_path"):
        if getattr(options, key, None):
            raise ConfigError(
                f"--full-parameters: backend.{key} trains adapters over frozen weights. Leave it out of the run file, or "
                "leave out --full-parameters."
            )
