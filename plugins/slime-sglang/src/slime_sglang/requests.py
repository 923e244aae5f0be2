"""SglangRequests: the requests that an engine's servers accept."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_serving.adapters import ServedAdapters
from slime_serving.image_tokens import ImageTokens
from slime_serving.requests import AcceptedRequests, vocab_size_of
from slime_sglang.experts import ExpertSizes
from slime_sglang.features import Features
from slime_sglang.generation import SglangRunning


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangRequests(AcceptedRequests):
    features: Features
    image_tokens: ImageTokens | None
    """None: the model takes no images."""
    experts: ExpertSizes | None
    """None: the servers were started without expert ids."""

    @classmethod
    def of(
        cls,
        setup: EngineSetup,
        features: Features,
        *,
        experts: ExpertSizes | None,
        adapters: ServedAdapters | None = None,
    ) -> SglangRequests:
        return cls(
            adapters=adapters,
            vocab_size=vocab_size_of(setup),
            has_tokenizer=features.tokenizer,
            features=features,
            image_tokens=ImageTokens.of(setup.model_path),
            experts=experts,
        )

    def begin(self, request: GenerateRequest) -> SglangRunning:
        return SglangRunning(
            request=request,
            vocab_size=self.vocab_size,
            image_tokens=self.image_tokens if request.images else None,
            adapter=self.adapter_of(request),
            experts=self.experts,
        )

    def refuses_sampling(self, params: SamplingParams) -> str | None:
        if params.repetition_penalty != 1:
            return (
                f"repetition_penalty = {params.repetition_penalty:g}: SGLang penalizes only the tokens that it generated "
                "for its latest request, not the prompt's tokens. Set it to 1, or use another engine."
            )
        if params.structural_tag is not None and not self.features.guided_decoding:
            return 'it has no guided decoding (structural_tag): set engine.grammar_backend = "xgrammar".'
        return None

    def refuses(self, request: GenerateRequest) -> str | None:
        if request.images:
            if self.image_tokens is None or not self.features.images:
                return f"request {request.request_id} has images, but its servers take none with this model."
            if problem := self.image_tokens.problem(request):
                return f"{problem}."
        if request.routed_experts_from is not None and self.experts is None:
            return f"request {request.request_id} requests expert ids, but the engine was started without them."
        return None
