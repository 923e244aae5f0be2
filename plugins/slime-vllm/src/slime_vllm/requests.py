"""VllmRequests: the requests that an engine's servers accept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import GenerateRequest
from slime_vllm.generation import VllmRunning


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRequests:
    vocab_size: int
    has_tokenizer: bool
    has_priorities: bool
    """The servers schedule by priority."""

    @classmethod
    def of(cls, setup: EngineSetup, *, has_priorities: bool) -> VllmRequests:
        config = json.loads((setup.model_path / "config.json").read_text())
        return cls(
            vocab_size=int((config.get("text_config") or config)["vocab_size"]),
            has_tokenizer=(setup.model_path / "tokenizer_config.json").exists(),
            has_priorities=has_priorities,
        )

    def problem(self, requests: Sequence[GenerateRequest], running: Container[str]) -> str | None:
        for params in {request.sampling for request in requests}:
            if problem := params.problem(self.vocab_size):
                return f"{problem}."
            if params.structural_tag is not None:
                return "slime-vllm sends no structural tags (tool_choice, response_format). Use engine sglang."
            if params.stop and not self.has_tokenizer:
                return "stop strings require a tokenizer in the model folder. Use stop_token_ids."
        counts = Counter(request.request_id for request in requests)
        if twice := [name for name, count in counts.items() if count > 1 or name in running]:
            return f"request ids that are duplicates or already in use: {', '.join(sorted(twice)[:8])}."
        return next((problem for request in requests if (problem := self._problem_of(request))), None)

    def _problem_of(self, request: GenerateRequest) -> str | None:
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
        tokens = request.token_ids
        if not len(tokens):
            return f"request {request.request_id} has no tokens. A prompt needs at least one."
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            return (
                f"token ids {tokens.min()} to {tokens.max()} in a prompt; the vocabulary has {self.vocab_size}. Prompt and "
                "engine must use one tokenizer."
            )
        return None

    def begin(self, request: GenerateRequest) -> VllmRunning:
        return VllmRunning(request=request, vocab_size=self.vocab_size)
