"""VllmRequests: the requests that an engine's servers accept."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_serving.adapters import ServedAdapters
from slime_serving.requests import AcceptedRequests, vocab_size_of
from slime_vllm.adapter import NAME
from slime_vllm.features import Features
from slime_vllm.generation import VllmRunning
from slime_vllm.images import SentImages


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRequests(AcceptedRequests):
    features: Features
    images: SentImages | None
    """None: the servers take no images with this model."""
    pause_mode: str
    model: str | None = None
    """See `VllmRunning.model`."""

    @classmethod
    def of(
        cls,
        setup: EngineSetup,
        features: Features,
        *,
        images: SentImages | None,
        pause_mode: str,
        adapters: ServedAdapters | None,
    ) -> VllmRequests:
        return cls(
            adapters=adapters,
            vocab_size=vocab_size_of(setup),
            has_tokenizer=features.tokenizer,
            features=features,
            images=images,
            pause_mode=pause_mode,
            model=NAME if setup.adapter_rank else None,
        )

    def begin(self, request: GenerateRequest) -> VllmRunning:
        images = self.images if request.images else None
        return VllmRunning(
            request=request, vocab_size=self.vocab_size, images=images, model=self.adapter_of(request) or self.model
        )

    def refuses_sampling(self, params: SamplingParams) -> str | None:
        if params.structural_tag is not None and not self.features.guided_decoding:
            return (
                "it has no guided decoding (structural_tag): this needs a tokenizer in the model folder, and xgrammar, vLLM's "
                "default, as the backend of engine.structured_outputs_config."
            )
        return None

    def refuses(self, request: GenerateRequest) -> str | None:
        if request.images and (problem := self._problem_of_images(request)):
            return problem
        if request.routed_experts_from is not None:
            return (
                f"request {request.request_id} requests expert ids, which slime-vllm does not read. Use engine sglang."
            )
        if request.priority and not self.features.has_priorities:
            return (
                f"request {request.request_id} has priority {request.priority}, but the servers schedule in order of "
                "arrival. Pass --vllm-scheduling-policy priority."
            )
        return None

    def _problem_of_images(self, request: GenerateRequest) -> str | None:
        if self.images is None:
            return f"request {request.request_id} has images, but its servers take none with this model."
        if self.pause_mode != "abort":
            return (
                f'request {request.request_id} has images, and engine.pause_mode = "{self.pause_mode}" would keep their '
                "features of old weights. Set abort."
            )
        if any(image.frames for image in request.images):
            return f"request {request.request_id} has videos, which slime-vllm does not send. Use engine local."
        problem = self.images.tokens.problem(request)
        return None if problem is None else f"{problem}."
