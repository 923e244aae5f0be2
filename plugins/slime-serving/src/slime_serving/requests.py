"""AcceptedRequests: the requests that an engine's servers accept, and why they refuse the others."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_serving.adapters import ServedAdapters
from slime_serving.running import Running


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequests(ABC):
    vocab_size: int
    has_tokenizer: bool
    """The servers find stop strings."""
    adapters: ServedAdapters | None = None
    """None: the servers hold none."""

    @abstractmethod
    def begin(self, request: GenerateRequest) -> Running: ...

    @abstractmethod
    def refuses_sampling(self, params: SamplingParams) -> str | None:
        """Why this program cannot sample so, as a sentence; None: it can."""

    @abstractmethod
    def refuses(self, request: GenerateRequest) -> str | None:
        """Why this program cannot serve the request, as a sentence; None: it can."""

    def adapter_of(self, request: GenerateRequest) -> str | None:
        """The servers' name of the adapter that an accepted request names."""
        if request.adapter is None or self.adapters is None:
            return None
        return self.adapters.served_name(request.adapter)

    def problem(self, requests: Sequence[GenerateRequest], running: Container[str]) -> str | None:
        """The first problem, as a sentence. `running`: ids in use."""
        for params in {request.sampling for request in requests}:
            if problem := params.problem(self.vocab_size):
                return f"{problem}."
            if refusal := self.refuses_sampling(params):
                return refusal
            if params.stop and not self.has_tokenizer:
                return "stop strings require a tokenizer in the model folder. Use stop_token_ids."
        counts = Counter(request.request_id for request in requests)
        if twice := [name for name, count in counts.items() if count > 1 or name in running]:
            return f"request ids that are duplicates or already in use: {', '.join(sorted(twice)[:8])}."
        return next((problem for request in requests if (problem := self._problem_of(request))), None)

    def _problem_of(self, request: GenerateRequest) -> str | None:
        if refusal := self.refuses(request):
            return refusal
        if request.adapter is not None and self.adapters is None:
            return f"request {request.request_id} names an adapter, and the engine holds none. Set engine.max_adapters."
        if self.adapters is not None and (problem := self.adapters.problem(request.adapter)):
            return f"request {request.request_id}: {problem}"
        tokens = request.token_ids
        if not len(tokens):
            return f"request {request.request_id} has no tokens. A prompt needs at least one."
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            return (
                f"token ids {tokens.min()} to {tokens.max()} in a prompt; the vocabulary has {self.vocab_size}. Prompt and "
                "engine must use one tokenizer."
            )
        return None


def vocab_size_of(setup: EngineSetup) -> int:
    """The number of rows of the model's embedding."""
    config = json.loads((setup.model_path / "config.json").read_text())
    text = config.get("text_config") or config
    return int(text["vocab_size"])
