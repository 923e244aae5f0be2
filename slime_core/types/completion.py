"""GenerateRequest and Completion: token ids in, token ids and log-probs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slime_core.types.image import Image
from slime_core.types.routed_experts import RoutedExperts
from slime_core.types.sample import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options."""

    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy (evaluation only)."""
    top_p: float = 1.0
    """In (0, 1]; 1: all tokens."""
    top_k: int = -1
    """-1: all tokens."""
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    """For tokens that occur in the prompt or the response so far, divides logits above 0 and multiplies those below. Values
    other than 1 require `Capability.REPETITION_PENALTY`."""
    stop: tuple[str, ...] = ()
    """Generation ends when the text ends with one of these; they stay in the response."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence tokens; the stopping token stays in the response."""
    skip_special_tokens: bool = False
    """Of the text in which engines search for `stop`."""

    structural_tag: str | None = None
    """JSON text of an XGrammar structural tag that the response must match: tokens that it does not allow are not sampled,
    and log-probs are those of the remaining distribution. Engines without `Capability.STRUCTURAL_TAG` refuse it."""

    def problem(self, vocab_size: int) -> str | None:
        """What is wrong with these options for every engine, without a full stop; None: nothing."""
        if not 0 <= self.temperature < float("inf"):
            return f"temperature = {self.temperature}: must be 0 (greedy) or above"
        if not 0 < self.top_p <= 1:
            return f"top_p = {self.top_p}: must be above 0 and at most 1"
        if self.top_k < -1 or self.top_k == 0:
            return f"top_k = {self.top_k}: must be above 0, or -1 for all"
        if not self.repetition_penalty > 0:
            return f"repetition_penalty = {self.repetition_penalty}: must be above 0"
        if self.max_new_tokens < 0 or self.min_new_tokens < 0:
            return f"max_new_tokens = {self.max_new_tokens}, min_new_tokens = {self.min_new_tokens}: must be 0 or above"
        outside = [token for token in self.stop_token_ids if not 0 <= token < vocab_size]
        if outside:
            return f"stop_token_ids {outside} are outside the vocabulary of {vocab_size}"
        if "" in self.stop:
            return "stop holds an empty string, which every text ends with"
        return None


class Caller(Protocol):
    """Has an `EngineCaller` in another process make calls."""

    async def call(self, asked: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """One sequence to continue."""

    request_id: str
    token_ids: npt.NDArray[np.int32]
    """(T,) prompt and response so far."""
    sampling: SamplingParams
    seed: int
    """Decides the random draws: same weights, same seed and same batch of requests give the same tokens."""
    session_id: str | None = None
    """Shared by the requests of one conversation, so that a router can send them to one engine; None: no conversation."""
    engines: tuple[int, ...] = ()
    """Indices of the engines that may serve it, the preferred one first. The client fills it in for the middlewares, which
    reorder or reduce it; unchanged or empty: any engine, by round robin."""
    priority: int = 0
    """Among waiting requests, higher values are served first."""
    images: tuple[Image, ...] = ()
    """Images of the prompt in `token_ids`, in the order of their image tokens (`Capability.IMAGES`)."""
    text: str | None = None
    """A prompt as text, with empty `token_ids`: a middleware must tokenize it. None: the prompt is in `token_ids`."""
    adapter: str | None = None
    """Loaded adapter whose weights are added to the engine's (`Capability.ADAPTERS`); None: none."""
    routed_experts_from: int | None = None
    """Requests expert ids from this position on, at most P (`Capability.ROUTED_EXPERTS`); None: no expert ids."""
    caller: Caller | None = None
    """Makes the call to the engine's server, in the process that the request comes from; None: the engine makes it."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """Result of one request; the stopping token is included."""

    request_id: str
    token_ids: npt.NDArray[np.int32]
    """(R,) the sampled tokens."""
    log_probs: npt.NDArray[np.float32]
    """(R,) nats, of the sampled tokens at the sampling temperature (for temperature 0: at 1)."""
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    """Policy version of each range of these tokens, in order."""
    cached_tokens: int = 0
    """Tokens of the request that were in the engine's prefix cache."""
    engine_index: int = 0
    extra: dict[str, float] = field(default_factory=dict)
    """Engine-specific counters, such as speculative decoding's, by metric name."""
    queue_s: float = 0.0
    """Seconds that the request waited before it was sent to an engine."""
    prompt_token_ids: npt.NDArray[np.int32] | None = None
    """(P,) tokens of a request that came as text; None: it came as tokens."""
    routed_experts: RoutedExperts | None = None
    """(P + R - 1 - start, layers, top_k) expert ids of the tokens [start, P + R - 1), where start is the request's
    `routed_experts_from` (0 in `Episode.complete`); the last token was no input of a forward. None: not requested, or no
    token was sampled."""

    @classmethod
    def empty(cls, request: GenerateRequest, reason: FinishReason) -> Completion:
        """Completion of a request that no engine got: it was aborted before, or has no room for a token."""
        return cls(
            request_id=request.request_id,
            token_ids=np.empty(0, np.int32),
            log_probs=np.empty(0, np.float32),
            finish_reason=reason,
            spans=(),
        )
