"""Models that compute nothing and note every call: what a model holds is a list of what it did."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.errors import ModelError
from slime_core.types.batch import Float32
from slime_core.types.completion import Completion, FinishReason, SamplingParams
from slime_session import Datum
from slime_tinker.models import AdamSettings, BaseModel, ModelSpec, PromptScores


class Weights:
    def __init__(self, models: ScriptedModels, done: list[Any]) -> None:
        self._models = models
        self.done = done

    def drop(self) -> None:
        self._models.open -= 1


class ScriptedModels:
    whole = False
    draws_by_seed = True
    max_models = 3
    max_weights = 2
    base_weights = None

    def __init__(self) -> None:
        self.base = BaseModel(name="base", folder=Path("base"), arch="none", vocab_size=50, max_length=64)
        self.done: dict[str, list[Any]] = {}
        self.calls: list[str] = []
        self.open = 0
        self.gate = threading.Event()
        """Cleared: a call of a trainer waits."""
        self.gate.set()
        self.disk = threading.Event()
        """Cleared: what is saved is not written."""
        self.disk.set()
        self.full = False
        """The disk has no room for what is saved."""
        self.waiting: list[Future[list[Completion]]] = []
        self.has_waiting = threading.Event()
        self.hold_samples = False

    def create(self, name: str, spec: ModelSpec) -> None:
        self._note(name, "create", spec.seed, new=True)

    def load(self, name: str, spec: ModelSpec, folder: Path, *, optimizer: bool) -> None:
        saved = read(folder)
        self.calls.append(f"{name} load")
        self.done[name] = saved if optimizer else [*saved, "new optimizer"]

    def remove(self, name: str) -> None:
        self.calls.append(f"{name} remove")
        del self.done[name]

    def forward(self, name: str, datums: Sequence[Datum]) -> Float32:
        self.calls.append(f"{name} forward")
        return self._log_probs(name, datums)

    def forward_backward(self, name: str, datums: Sequence[Datum], loss: Any) -> Float32:
        self._note(name, "forward_backward", [int(datum.tokens[0]) for datum in datums])
        return self._log_probs(name, datums)

    def optim_step(self, name: str, adam: AdamSettings) -> float:
        self._note(name, "optim_step", adam.lr)
        return float(len(self.done[name]))

    def save(self, name: str, folder: Path, *, optimizer: bool) -> Callable[[], None]:
        self.calls.append(f"{name} save")
        content = json.dumps(self.done[name])

        def write() -> None:
            assert self.disk.wait(20)
            folder.mkdir()
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device", str(folder))
            (folder / "done.json").write_text(content)

        return write

    def open_weights(self, folder: Path) -> Weights:
        done = read(folder)
        self.open += 1
        assert self.open <= self.max_weights
        return Weights(self, done)

    def start_sampling(
        self, weights: Weights | None, prompt: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> Future[list[Completion]]:
        """One token, which is how much the weights had done, and the seed's last digits as log-prob."""
        token = 0 if weights is None else len(weights.done)
        found: Future[list[Completion]] = Future()
        completions = [
            Completion(
                request_id="",
                token_ids=np.array([token], np.int32),
                log_probs=np.array([-(seed % 1000)], np.float32),
                finish_reason=FinishReason.LENGTH,
                spans=(),
            )
            for seed in seeds
        ]
        if self.hold_samples:
            self.waiting.append(found)
            self.has_waiting.set()
        else:
            found.set_result(completions)
        return found

    def prompt_scores(self, weights: Weights | None, prompt: Sequence[int], top_k: int) -> Future[PromptScores]:
        found: Future[PromptScores] = Future()
        rows = len(prompt) - 1
        found.set_result(PromptScores(log_probs=-np.arange(1, rows + 1, dtype=np.float32)))
        return found

    def close(self) -> None:
        pass

    def _note(self, name: str, *call: Any, new: bool = False) -> None:
        assert self.gate.wait(20)
        self.calls.append(f"{name} {call[0]}")
        self.done[name] = [list(call)] if new else [*self.done[name], list(call)]

    def _log_probs(self, name: str, datums: Sequence[Datum]) -> Float32:
        return np.full(sum(datum.response_length for datum in datums), -float(len(self.done[name])), np.float32)


def read(folder: Path) -> list[Any]:
    try:
        return list(json.loads((folder / "done.json").read_text()))
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read") from error
