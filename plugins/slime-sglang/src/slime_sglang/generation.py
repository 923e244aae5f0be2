"""SglangRunning: one request to SGLang with its response so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from slime_core.errors import EngineError, EngineRefused
from slime_core.types.completion import Completion, FinishReason
from slime_core.types.routed_experts import RoutedExperts
from slime_serving.image_tokens import ImageTokens, data_url, require_all_read
from slime_serving.running import INVALID, Part, Running, column, covering_spans, version_of
from slime_serving.spec_decode_stats import SpecDecodeStats
from slime_sglang.experts import ExpertSizes

BAD_REQUEST: Final = 400
SEED_BITS: Final = (1 << 63) - 1
ADVICE: Final = "Use the run's model folder for it, and do not disable SGLANG_MM_AVOID_RETOKENIZE."
"""SGLang keeps the other token ids of a prompt with images; the variable is on by default."""


def drafts_of(meta: Mapping[str, Any], written: int) -> SpecDecodeStats:
    """All counts are 0 if the server does not speculate. Servers before 0.5.20 use other names for the counts."""
    verified = int(meta.get("spec_verify_ct") or 0)
    if not verified:
        return SpecDecodeStats()
    proposed = first_of(meta, "spec_num_proposed_drafts", "spec_proposed_drafts")
    accepted = first_of(meta, "spec_num_correct_drafts", "spec_accepted_drafts")
    return SpecDecodeStats(verified=verified, proposed=proposed, accepted=accepted, written=written)


def first_of(meta: Mapping[str, Any], *names: str) -> int:
    return next((int(meta[name]) for name in names if meta.get(name) is not None), 0)


@dataclass(slots=True, eq=False, kw_only=True)
class SglangRunning(Running):
    image_tokens: ImageTokens | None = None
    """The model's image tokens, for a request with images."""
    adapter: str | None = None
    """Its name on the servers."""
    experts: ExpertSizes | None = None
    """Set if expert ids can be requested."""
    drafts: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    """Expert ids of the tokens from the request's `routed_experts_from`, one array per part."""

    def body(self, room: int) -> dict[str, Any]:
        request, written = self.request, len(self.token_ids)
        sampling = request.sampling
        budget = min(sampling.max_new_tokens - written, room)
        least = sampling.min_new_tokens - written
        params: dict[str, Any] = {
            "max_new_tokens": budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": sampling.repetition_penalty,
            "skip_special_tokens": sampling.skip_special_tokens,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": request.seed & SEED_BITS,
            "n": 1,
        }
        if sampling.structural_tag is not None:
            params["structural_tag"] = sampling.structural_tag
        if least >= budget:
            # No token may end it early. SGLang's min_new_tokens would remove the end tokens from the distribution, and the
            # log-probs would be those of another policy.
            params["ignore_eos"] = True
        else:
            if least > 0:
                params["min_new_tokens"] = least
            if sampling.stop:
                params["stop"] = list(sampling.stop)
            if sampling.stop_token_ids:
                params["stop_token_ids"] = list(sampling.stop_token_ids)
        tokens = self.tokens()
        asked: dict[str, Any] = {}
        if self.asks_experts:
            asked = {"return_routed_experts": True, "routed_experts_start_len": self.experts_from}
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": tokens,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            **asked,
        }
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        if self.image_tokens is not None:
            body["input_ids"] = np.ascontiguousarray(self.image_tokens.collapsed(tokens))
            body["image_data"] = [data_url(image.data) for image in request.images]
        return body

    @property
    def asks_experts(self) -> bool:
        return self.request.routed_experts_from is not None

    @property
    def experts_from(self) -> int:
        """The first token whose expert ids are not known yet."""
        return (self.request.routed_experts_from or 0) + sum(map(len, self.routed_experts))

    def take(self, reply: Any, *, expected_version: int | None, server: str) -> FinishReason:
        sent = len(self.request.token_ids) + len(self.token_ids)
        try:
            meta = reply["meta_info"]
            reason = finish_reason(meta["finish_reason"], server)
            rows = meta["output_token_logprobs"]
            part = Part(
                token_ids=column(rows, 1, np.int64),
                log_probs=column(rows, 0, np.float64),
                spans=spans_of(meta, len(rows)),
                cached_tokens=int(meta.get("cached_tokens", 0)),
            )
            prompt_tokens = int(meta["prompt_tokens"]) if self.image_tokens is not None else None
            routed = []
            if self.asks_experts and self.experts is not None and rows:
                # The last token was sampled and not read.
                routed.append(self.experts.read(meta.get("routed_experts"), sent + len(rows) - 1 - self.experts_from))
        except EngineError:
            raise
        except INVALID as error:
            raise self.invalid(server, reply, error) from error
        if prompt_tokens is not None and reason is not FinishReason.ABORT:
            require_all_read(prompt_tokens, sent, self.request.request_id, server, ADVICE)
        self.add(part, expected_version=expected_version, server=server)
        self.drafts = self.drafts + drafts_of(meta, len(rows))
        self.routed_experts += routed
        return reason

    def kept(self) -> int:
        keep = Running.kept(self)
        return keep if self.image_tokens is None else min(keep, self.image_tokens.first_in(self.token_ids))

    def interrupt(self) -> None:
        Running.interrupt(self)
        if self.routed_experts:
            keep = len(self.token_ids)
            start = self.request.routed_experts_from or 0
            # If no token is kept, the prompt's experts are also chosen by the next part's weights.
            rows = max(0, len(self.request.token_ids) + keep - 1 - start) if keep else 0
            self.routed_experts = [np.concatenate(self.routed_experts)[:rows]]

    def completion(self, reason: FinishReason, engine_index: int, **others: Any) -> Completion:
        return Running.completion(
            self,
            reason,
            engine_index,
            extra=self.drafts.metrics,
            routed_experts=np.concatenate(self.routed_experts) if self.routed_experts and len(self.token_ids) else None,
        )


def finish_reason(reason: Mapping[str, Any] | None, server: str) -> FinishReason:
    kind = None if reason is None else reason["type"]
    if kind == "abort" and reason is not None and reason.get("status_code") not in (None, 200):
        # SGLang ends a request that it could not serve with "abort", for errors of the request and of its own.
        kind_of = EngineRefused if reason["status_code"] == BAD_REQUEST else EngineError
        raise kind_of(f"{server}: refused a request: {reason.get('message')}")
    try:
        return FinishReason(str(kind))
    except ValueError:
        raise EngineError(f'{server}: a response ends with reason "{kind}", which slime does not know.') from None


def spans_of(meta: Mapping[str, Any], count: int) -> list[tuple[int, int, int]]:
    """(version, start, end) of the tokens of a response; one span if the server returns only the last version."""
    given = meta.get("weight_versions")
    if not count:
        return []
    if given is None:
        return [(version_of(meta["weight_version"]), 0, count)]
    return covering_spans(given, count)
