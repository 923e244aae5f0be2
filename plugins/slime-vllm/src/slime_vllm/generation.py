"""VllmRunning: one request to vLLM with its response so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from slime_core.errors import EngineError
from slime_core.types.completion import Completion, FinishReason
from slime_serving.image_tokens import require_all_read
from slime_serving.running import INVALID, Part, Running, column, covering_spans
from slime_serving.spec_decode_stats import SpecDecodeStats
from slime_vllm.images import SentImages

SEED_BITS: Final = (1 << 63) - 1
PREFIX: Final = "generate-tokens-"
"""vLLM puts it before the ids of requests."""
ADVICE: Final = "Use the run's model folder for it."


@dataclass(slots=True, eq=False, kw_only=True)
class VllmRunning(Running):
    images: SentImages | None = None
    """For a request with images."""
    model: str | None = None
    """Name of the adapter that responds; None: the weights themselves."""
    drafts: SpecDecodeStats = field(default_factory=SpecDecodeStats)

    def body(self, room: int) -> dict[str, Any]:
        sampling, written = self.request.sampling, len(self.token_ids)
        budget = min(sampling.max_new_tokens - written, room)
        least = sampling.min_new_tokens - written
        params: dict[str, Any] = {
            "max_tokens": budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            # vLLM penalizes the tokens of prompt and response, as transformers does.
            "repetition_penalty": sampling.repetition_penalty,
            # Each part draws anew: with the request's seed alone a part would repeat the draws of the one before.
            "seed": (self.request.seed + written) & SEED_BITS,
            "logprobs": 0,
            "n": 1,
            "skip_special_tokens": sampling.skip_special_tokens,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
            "detokenize": bool(sampling.stop),
        }
        if sampling.structural_tag is not None:
            params["structured_outputs"] = {"structural_tag": sampling.structural_tag}
        if least >= budget:
            # No token may end it early. min_tokens would remove the end tokens from the distribution, and the log-probs would
            # be those of another policy.
            params["ignore_eos"] = True
        else:
            if least > 0:
                params["min_tokens"] = least
            if sampling.stop:
                params["stop"] = list(sampling.stop)
            if sampling.stop_token_ids:
                params["stop_token_ids"] = list(sampling.stop_token_ids)
        body = {
            "request_id": self.rid,
            "token_ids": self.tokens(),
            "sampling_params": params,
            "priority": -self.request.priority,
            "stream": False,
        }
        if self.model is not None:
            body["model"] = self.model
        if self.images is not None:
            body["token_ids"] = np.ascontiguousarray(self.images.tokens.collapsed(self.tokens()))
            body["content_parts"] = self.images.parts(self.request.images)
        return body

    def kept(self) -> int:
        keep = Running.kept(self)
        return keep if self.images is None else min(keep, self.images.tokens.first_in(self.token_ids))

    def take(self, reply: Any, *, expected_version: int | None, server: str) -> FinishReason:
        try:
            (choice,) = reply["choices"]
            reason = finish_reason(choice["finish_reason"], server)
            content = (choice["logprobs"] or {}).get("content") or []
            given = choice["token_ids"]
            token_ids = np.asarray(() if given is None else given, np.int64)
            if not np.array_equal(column(content, "token_id", np.int64), token_ids):
                raise ValueError(f"it has log-probs of {len(content)} other tokens than its {len(token_ids)}")
            part = Part(
                token_ids=token_ids,
                log_probs=column(content, "logprob", np.float64),
                spans=covering_spans(choice["weight_versions"] or (), len(token_ids)),
                cached_tokens=cached_tokens(reply.get("usage") or {}),
            )
            prompt_tokens = int(reply["usage"]["prompt_tokens"]) if self.images is not None else None
            drafts = drafts_of((reply.get("metrics") or {}).get("speculative_decoding") or {})
        except EngineError:
            raise
        except INVALID as error:
            raise self.invalid(server, reply, error) from error
        if prompt_tokens is not None:
            require_all_read(prompt_tokens, len(self.tokens()), self.request.request_id, server, ADVICE)
        self.add(part, expected_version=expected_version, server=server)
        self.drafts = self.drafts + drafts
        return reason

    def completion(self, reason: FinishReason, engine_index: int, **others: Any) -> Completion:
        return Running.completion(self, reason, engine_index, extra=self.drafts.metrics)


def cached_tokens(usage: Mapping[str, Any]) -> int:
    """0 for an external server that was started without `--enable-prompt-tokens-details`."""
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def drafts_of(counts: Mapping[str, Any]) -> SpecDecodeStats:
    """`counts`: vLLM's `speculative_decoding`; empty if the server does not speculate."""
    if not counts:
        return SpecDecodeStats()
    verified, accepted = int(counts["num_spec_steps"]), int(counts["num_accepted_draft_tokens"])
    # Tokens of steps without a draft are no part of these counts.
    return SpecDecodeStats(verified, int(counts["num_draft_tokens"]), accepted, accepted + verified)


def finish_reason(reason: str | None, server: str) -> FinishReason:
    try:
        return FinishReason(str(reason))
    except ValueError:
        raise EngineError(f'{server}: a response ends with reason "{reason}", which slime does not know.') from None
