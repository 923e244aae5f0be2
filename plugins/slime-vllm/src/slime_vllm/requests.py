"""VllmRequests: the requests that an engine's servers accept."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_serving.requests import AcceptedRequests, vocab_size_of
from slime_vllm.generation import VllmRunning


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRequests(AcceptedRequests):
    has_priorities: bool
    """The servers schedule by priority."""

    @classmethod
    def of(cls, setup: EngineSetup, *, has_priorities: bool) -> VllmRequests:
        return cls(
            vocab_size=vocab_size_of(setup),
            has_tokenizer=(setup.model_path / "tokenizer_config.json").exists(),
            has_priorities=has_priorities,
        )

    def begin(self, request: GenerateRequest) -> VllmRunning:
        return VllmRunning(request=request, vocab_size=self.vocab_size)

    def refuses_sampling(self, params: SamplingParams) -> str | None:
        if params.repetition_penalty != 1:
            return (
                f"repetition_penalty = {params.repetition_penalty:g}: its log-probs with vLLM were not compared with "
                "transformers. Set it to 1, or use another engine."
            )
        if params.structural_tag is not None:
            return "slime-vllm sends no structural tags (tool_choice, response_format). Use engine sglang."
        return None

    def refuses(self, request: GenerateRequest) -> str | None:
        if request.images:
            return f"request {request.request_id} has images, which slime-vllm does not send. Use engine sglang."
        if request.routed_experts_from is not None:
            return (
                f"request {request.request_id} requests expert ids, which slime-vllm does not read. Use engine sglang."
            )
        if request.priority and not self.has_priorities:
            return (
                f"request {request.request_id} has priority {request.priority}, but the servers schedule in order of "
                "arrival. Pass --vllm-scheduling-policy priority."
            )
        return None
