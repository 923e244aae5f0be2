"""SessionAdapters: `Models` over a slime session, each a LoRA adapter over the run's frozen base."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from slime_core.config.bound import BoundRun
from slime_core.data.model_folder import context_length, read_model_config
from slime_core.errors import ConfigError, TrainingError
from slime_core.types.batch import Float32
from slime_core.types.completion import Completion, SamplingParams
from slime_core.workers.choose import choose_device
from slime_session import Datum, TrainingSession
from slime_session.adapter import Adapter, Snapshot
from slime_session.loss_choice import Loss
from slime_session.reports import OptimizerStepReport
from slime_tinker.errors import SkippedStep
from slime_tinker.models import AdamSettings, BaseModel, ModelSpec, PromptScores, SamplerWeights
from slime_training.adapters.drivers import AdapterSampler
from slime_training.adapters.folder import read_adapter_folder, read_optimizer_file

MOST_DATUMS: Final = 1024
"""Of one batch of the session; more datums are several, whose gradients add up."""
SCORERS: Final = 8
"""Prompts that are scored at a time."""


class SessionAdapters:
    """See `slime_tinker.models.Models`."""

    whole = False

    def __init__(self, session: TrainingSession, *, name: str) -> None:
        """`name`: of the base model, for clients."""
        self._session = session
        config = session.run.config
        backend, engine = session.run.backend.config, session.run.engine
        self.max_models = int(getattr(backend, "max_adapters", 0) or 0)
        self.max_weights = 0 if engine is None else int(getattr(engine.config, "max_adapters", 0) or 0)
        if not self.max_models or not self.max_weights:
            raise ConfigError(
                "backend.max_adapters and engine.max_adapters: not set, and each model of a client is an adapter. Set both in "
                "the run file, such as 8 and 32, with a backend and an engine that have them (fsdp; local, sglang, vllm); or "
                "pass --full-parameters, for one model at a time that trains all weights."
            )
        self.draws_by_seed = draws_by_seed(session.run)
        self.base = base_model(Path(config.model.hf_checkpoint), name)
        self.base_weights: Path | None = None
        self._scorer = PromptScorer(session)

    def create(self, name: str, spec: ModelSpec) -> None:
        assert spec.rank is not None
        self._session.add_adapter(
            name,
            rank=spec.rank,
            seed=spec.seed,
            attention=spec.attention,
            mlp=spec.mlp,
            unembedding=spec.unembedding,
        )

    def load(self, name: str, spec: ModelSpec, folder: Path, *, optimizer: bool) -> None:
        # Before the adapter that is there is removed: trainers may have no room for both.
        require_loadable(folder, optimizer=optimizer)
        self.remove(name)
        self._session.load_adapter(name, folder, optimizer=optimizer)

    def remove(self, name: str) -> None:
        adapter = self._session.adapters.get(name)
        if adapter is not None:
            adapter.remove()

    def forward(self, name: str, datums: Sequence[Datum]) -> Float32:
        adapter = self._adapter(name)
        return np.concatenate([adapter.forward(self._session.batch(part)) for part in parts_of(datums)])

    def forward_backward(self, name: str, datums: Sequence[Datum], loss: Loss) -> Float32:
        adapter = self._adapter(name)
        found = [adapter.forward_backward(self._session.batch(part), loss=loss) for part in parts_of(datums)]
        return np.concatenate([gradients.log_probs for gradients in found])

    def optim_step(self, name: str, adam: AdamSettings) -> float:
        report = self._adapter(name).optim_step(
            adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, grad_clip=adam.grad_clip
        )
        require_taken(report)
        return report.grad_norm

    def save(self, name: str, folder: Path, *, optimizer: bool) -> Callable[[], None]:
        return partial(self._adapter(name).copy(optimizer=optimizer).write, folder)

    def open_weights(self, folder: Path) -> SamplerWeights:
        return self._session.load_snapshot(folder)

    def start_sampling(
        self, weights: SamplerWeights | None, prompt: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> Future[list[Completion]]:
        prompts = [prompt] * len(seeds)
        return self._session.start_generating(prompts, sampling, seeds=seeds, snapshot=snapshot_of(weights))

    def prompt_scores(self, weights: SamplerWeights | None, prompt: Sequence[int], top_k: int) -> Future[PromptScores]:
        return self._scorer.start(snapshot_of(weights), prompt, top_k)

    def close(self) -> None:
        self._scorer.close()
        self._session.close()

    def _adapter(self, name: str) -> Adapter:
        """TrainingError for one that a `load` which failed has left without weights."""
        adapter = self._session.adapters.get(name)
        if adapter is None:
            raise TrainingError(
                "this model has no weights: those that were to be loaded could not be. Call load_state with another checkpoint."
            )
        return adapter


class PromptScorer:
    """Scores prompts in threads."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._threads = ThreadPoolExecutor(SCORERS, "prompt-log-probs")

    def start(self, snapshot: Snapshot | None, prompt: Sequence[int], top_k: int) -> Future[PromptScores]:
        return self._threads.submit(self._scores, snapshot, prompt, top_k)

    def _scores(self, snapshot: Snapshot | None, prompt: Sequence[int], top_k: int) -> PromptScores:
        (found,) = self._session.prompt_log_probs([prompt], top_k=top_k, snapshot=snapshot)
        if not top_k:
            return PromptScores(log_probs=found.log_probs)
        return PromptScores(log_probs=found.log_probs, top_ids=found.top_ids, top_log_probs=found.top_log_probs)

    def close(self) -> None:
        self._threads.shutdown()


def require_loadable(folder: Path, *, optimizer: bool) -> None:
    """ModelError or CheckpointError for a folder that cannot be read."""
    read_adapter_folder(folder)
    if optimizer:
        read_optimizer_file(folder, ())


def require_taken(report: OptimizerStepReport) -> None:
    if report.skipped:
        raise SkippedStep(
            f"optim_step: the gradient is not finite (norm {report.grad_norm:g}); nothing was changed. Lower "
            "learning_rate, or look at logprobs and advantages."
        )


def draws_by_seed(run: BoundRun) -> bool:
    """See `Models.draws_by_seed`."""
    if run.engine is None or not issubclass(run.engine.driver, AdapterSampler):
        return False
    return bool(run.engine.driver.draws_by_seed(run.engine.config, choose_device(run.config.launcher.device)))


def parts_of(datums: Sequence[Datum]) -> Iterator[Sequence[Datum]]:
    for start in range(0, len(datums), MOST_DATUMS):
        yield datums[start : start + MOST_DATUMS]


def snapshot_of(weights: SamplerWeights | None) -> Snapshot | None:
    assert weights is None or isinstance(weights, Snapshot)
    return weights


def base_model(folder: Path, name: str) -> BaseModel:
    """ModelError for a folder without config.json."""
    config = read_model_config(folder)
    text = config.get("text_config", config)
    length = context_length(config)
    if length is None:
        raise ConfigError(
            f"{folder}/config.json: has no max_position_embeddings, so the length of its texts is not known."
        )
    return BaseModel(
        name=name,
        folder=folder.resolve(),
        arch=str(config.get("model_type", "unknown")),
        vocab_size=int(text["vocab_size"]),
        max_length=length,
    )
