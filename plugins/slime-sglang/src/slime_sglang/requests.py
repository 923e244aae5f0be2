"""SglangRequests: the requests that an engine's servers accept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import GenerateRequest
from slime_sglang.experts import ExpertSizes
from slime_sglang.features import Features
from slime_sglang.generation import SglangRunning
from slime_sglang.image_data import ImageTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangRequests:
    vocab_size: int
    features: Features
    image_tokens: ImageTokens | None
    """None: the model takes no images."""
    experts: ExpertSizes | None
    """None: the servers were started without expert ids."""

    @classmethod
    def of(cls, setup: EngineSetup, features: Features, *, experts: ExpertSizes | None) -> SglangRequests:
        return cls(
            vocab_size=vocab_size_of(setup),
            features=features,
            image_tokens=ImageTokens.of(setup.model_path),
            experts=experts,
        )

    def problem(self, requests: Sequence[GenerateRequest], running: Container[str]) -> str | None:
        """The first problem, as a sentence. `running`: ids in use."""
        for params in {request.sampling for request in requests}:
            if problem := params.problem(self.vocab_size):
                return f"{problem}."
            if params.repetition_penalty != 1:
                return (
                    f"repetition_penalty = {params.repetition_penalty:g}: SGLang penalizes only the tokens that it generated "
                    "for its latest request, not the prompt's tokens. Set it to 1, or use another engine."
                )
            if params.stop and not self.features.tokenizer:
                return "stop strings require a tokenizer in the model folder. Use stop_token_ids."
            if params.structural_tag is not None and not self.features.guided_decoding:
                return 'it has no guided decoding (structural_tag): set engine.grammar_backend = "xgrammar".'
        counts = Counter(request.request_id for request in requests)
        if twice := [name for name, count in counts.items() if count > 1 or name in running]:
            return f"request ids that are duplicates or already in use: {', '.join(sorted(twice)[:8])}."
        return next((problem for request in requests if (problem := self._problem_of(request))), None)

    def begin(self, request: GenerateRequest) -> SglangRunning:
        return SglangRunning(
            request=request,
            vocab_size=self.vocab_size,
            image_tokens=self.image_tokens if request.images else None,
            experts=self.experts,
        )

    def _problem_of(self, request: GenerateRequest) -> str | None:
        if request.images:
            if self.image_tokens is None or not self.features.images:
                return f"request {request.request_id} has images, but its servers take none with this model."
            if problem := self.image_tokens.problem(request):
                return f"{problem}."
        if request.routed_experts_from is not None and self.experts is None:
            return f"request {request.request_id} requests expert ids, but the engine was started without them."
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
