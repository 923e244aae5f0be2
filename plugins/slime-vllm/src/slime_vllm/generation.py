"""VllmRunning: one request to vLLM with its response so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from slime_core.errors import EngineError
from slime_core.types.completion import FinishReason
from slime_serving.running import Part, Running, column, covering_spans

SEED_BITS: Final = (1 << 63) - 1
PREFIX: Final = "generate-tokens-"
"""vLLM puts it before the ids of requests."""


@dataclass(slots=True, eq=False, kw_only=True)
class VllmRunning(Running):
    def body(self, room: int) -> dict[str, Any]:
        sampling, written = self.request.sampling, len(self.token_ids)
        budget = min(sampling.max_new_tokens - written, room)
        least = sampling.min_new_tokens - written
        params: dict[str, Any] = {
            "max_tokens": budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            # Each part draws anew: with the request's seed alone a part would repeat the draws of the one before.
            "seed": (self.request.seed + written) & SEED_BITS,
            "logprobs": 0,
            "n": 1,
            "skip_special_tokens": sampling.skip_special_tokens,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
            "detokenize": bool(sampling.stop),
        }
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
        return {
            "request_id": self.rid,
            "token_ids": self.tokens(),
            "sampling_params": params,
            "priority": -self.request.priority,
            "stream": False,
        }

    def take(self, reply: Any, *, expected_version: int | None, server: str) -> FinishReason:
        try:
            (choice,) = reply["choices"]
            reason = finish_reason(choice["finish_reason"], server)
            content = (choice["logprobs"] or {}).get("content") or []
            token_ids = np.asarray(choice["token_ids"] or (), np.int64)
            if not np.array_equal(column(content, "token_id", np.int64), token_ids):
                raise ValueError(f"it has log-probs of {len(content)} other tokens than its {len(token_ids)}")
            part = Part(
                token_ids=token_ids,
                log_probs=column(content, "logprob", np.float64),
                spans=covering_spans(choice["weight_versions"] or (), len(token_ids)),
            )
        except EngineError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise self.invalid(server, reply, error) from error
        self.add(part, expected_version=expected_version, server=server)
        return reason


def finish_reason(reason: str | None, server: str) -> FinishReason:
    try:
        return FinishReason(str(reason))
    except ValueError:
        raise EngineError(f'{server}: a response ends with reason "{reason}", which slime does not know.') from None
