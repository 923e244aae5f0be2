"""What is asked of an engine, and what it answers: token ids in, token ids and log-probs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from slime_core.types.image import Image
from slime_core.types.routed_experts import RoutedExperts
from slime_core.types.sample import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. Temperature 0 is greedy (evaluation only)."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    """Divides logits above 0 of tokens that the prompt or the answer so far has, and multiplies those below. Other than 1 only
    with `Capability.REPETITION_PENALTY`."""
    stop: tuple[str, ...] = ()
    """Generation ends when the text ends with one of these; they stay in the response."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence tokens; the stopping token stays in the response."""
    skip_special_tokens: bool = False

    def problem(self, vocab_size: int) -> str | None:
        """Why no engine could sample so, without a full stop."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """One sequence to continue. `seed` alone decides the random draws: same weights, same seed, same batch of
    requests give the same tokens."""

    request_id: str
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    seed: int
    session_id: str | None = None
    """Requests of one conversation share it, so that a router can send them to one engine."""
    engines: tuple[int, ...] = ()
    """Engines that may answer, the preferred one first. Who sends requests fills it in for the middlewares, which
    reorder or narrow it; unchanged or empty: any engine, in turn."""
    priority: int = 0
    """Where requests wait, a higher one goes first."""
    images: tuple[Image, ...] = ()
    """Of the prompt that `token_ids` begin with, in the order of their image tokens (`Capability.IMAGES`)."""
    text: str | None = None
    """A prompt whose tokens are not known yet: then `token_ids` is empty, and a middleware must fill it in, since engines
    take tokens alone."""
    routed_experts_from: int | None = None
    """The answer is to tell the expert ids of the tokens from this position on, at most the prompt's length; None: of none.
    Only with `Capability.ROUTED_EXPERTS`."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """The answer to one request; the stopping token is part of it."""

    request_id: str
    token_ids: npt.NDArray[np.int32]
    """(R,)"""
    log_probs: npt.NDArray[np.float32]
    """(R,) nats, of the sampled tokens at the sampling temperature (temperature 0: at temperature 1)."""
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    cached_tokens: int = 0
    engine_index: int = 0
    extra: dict[str, float] = field(default_factory=dict)
    """Engine-specific counters, such as speculative decoding's, by metric name."""
    queue_s: float = 0.0
    """Seconds that the request waited for a place in an engine."""
    prompt_token_ids: npt.NDArray[np.int32] | None = None
    """(P,) of a request that came as text: what the engine continued."""
    routed_experts: RoutedExperts | None = None
    """(P + R - 1 - start, layers, top_k) expert ids of the tokens [start, P + R - 1), start being the request's
    `routed_experts_from`; to generators start is 0. The last token was sampled and not read. None: not asked for, or no token
    was written."""

    @classmethod
    def empty(cls, request: GenerateRequest, reason: FinishReason) -> Completion:
        """The answer to a request that no engine saw: it was ended before, or has no room for a token."""
        return cls(
            request_id=request.request_id,
            token_ids=np.empty(0, np.int32),
            log_probs=np.empty(0, np.float32),
            finish_reason=reason,
            spans=(),
        )
