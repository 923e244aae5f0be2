"""Running: one request with its response so far, also when it continues with new weights."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from slime_core.errors import EngineError, EngineRefused
from slime_core.types.completion import Completion, FinishReason, GenerateRequest
from slime_core.types.routed_experts import RoutedExperts
from slime_core.types.sample import VersionSpan
from slime_sglang.experts import ExpertSizes
from slime_sglang.image_data import ImageTokens, encoded

INITIAL: Final = "default"
"""SGLang's version label of the weights that it started with."""
BAD_REQUEST: Final = 400
SEED_BITS: Final = (1 << 63) - 1
SLACK: Final = 1e-3
"""How far rounding may put a log-prob above 0."""


def version_of(label: object) -> int:
    """The policy version of a label; -1 for the weights that a server started with. Raises ValueError for a label that slime
    did not set."""
    return -1 if label == INITIAL else int(str(label))


class RequestIds:
    """Ids for SGLang: they begin with the run's ids; none is used twice or is a prefix of another.

    SGLang aborts all requests whose id begins with an aborted id, and sometimes one that reuses the id of a finished request.
    """

    def __init__(self) -> None:
        self._start = secrets.token_hex(4)
        self._count = itertools.count()

    def next_for(self, request_id: str) -> str:
        return f"{request_id}#{self._start}-{next(self._count)}."


@dataclass(frozen=True, slots=True)
class SpecDecodeStats:
    """Counts of speculative decoding for a response, or for a part of it: parts can be added."""

    verified: int = 0
    """Forward passes of the model itself."""
    proposed: int = 0
    accepted: int = 0
    written: int = 0
    """Tokens that those passes produced, including one per pass that the model itself sampled."""

    @classmethod
    def of(cls, meta: Mapping[str, Any], written: int) -> SpecDecodeStats:
        """All counts are 0 if the server does not speculate. Servers before 0.5.20 use other names for the counts."""
        verified = int(meta.get("spec_verify_ct") or 0)
        if not verified:
            return cls()
        proposed = first_of(meta, "spec_num_proposed_drafts", "spec_proposed_drafts")
        accepted = first_of(meta, "spec_num_correct_drafts", "spec_accepted_drafts")
        return cls(verified=verified, proposed=proposed, accepted=accepted, written=written)

    def __add__(self, other: SpecDecodeStats) -> SpecDecodeStats:
        return SpecDecodeStats(
            self.verified + other.verified,
            self.proposed + other.proposed,
            self.accepted + other.accepted,
            self.written + other.written,
        )

    @property
    def metrics(self) -> dict[str, float]:
        if not self.verified:
            return {}
        found = {"spec_verify_ct": float(self.verified), "spec_accept_length": self.written / self.verified}
        if self.proposed:
            found["spec_accept_rate"] = self.accepted / self.proposed
        return found


def first_of(meta: Mapping[str, Any], *names: str) -> int:
    return next((int(meta[name]) for name in names if meta.get(name) is not None), 0)


@dataclass(slots=True, eq=False)
class Running:
    """A request and its response so far."""

    request: GenerateRequest
    image_tokens: ImageTokens | None = None
    """The model's image tokens, for a request with images."""
    rid: str = ""
    """Id of the part that is on a server."""
    part: int = 0
    """How often it was interrupted."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    drafts: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    """Expert ids of the tokens from the request's `routed_experts_from`, one array per part."""
    sweep: int = 0
    """Number of completed abort-all calls of the engine when this part was sent."""
    aborted: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by an abort, if the request waits here, and when there is a response."""

    def body(self, room: int) -> dict[str, Any]:
        """The body for /generate, for at most `room` further tokens."""
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
        tokens = request.token_ids
        if written:
            tokens = np.concatenate([tokens, np.asarray(self.token_ids, tokens.dtype)])
        asked: dict[str, Any] = {}
        if self.asks_experts:
            asked = {"return_routed_experts": True, "routed_experts_start_len": self.experts_from}
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": np.ascontiguousarray(tokens),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            **asked,
        }
        if self.image_tokens is not None:
            body["input_ids"] = np.ascontiguousarray(self.image_tokens.collapsed(tokens))
            body["image_data"] = encoded(request.images)
        return body

    @property
    def asks_experts(self) -> bool:
        return self.request.routed_experts_from is not None

    @property
    def experts_from(self) -> int:
        """The first token whose expert ids are not known yet."""
        return (self.request.routed_experts_from or 0) + sum(map(len, self.routed_experts))

    def take(
        self,
        reply: Any,
        *,
        expected_version: int | None,
        vocab_size: int,
        server: str,
        experts: ExpertSizes | None = None,
    ) -> FinishReason:
        """Adds a part of the response, and returns why it ended. Raises EngineError for an invalid response.
        `expected_version`: version of all its tokens, if no weights can have changed meanwhile. `experts`: set if expert ids
        can be requested."""
        try:
            meta = reply["meta_info"]
            reason = finish_reason(meta["finish_reason"], server)
            pairs = [(float(entry[0]), int(entry[1])) for entry in meta["output_token_logprobs"]]
            spans = spans_of(meta, len(pairs))
            cached = int(meta.get("cached_tokens", 0))
            prompt_tokens = int(meta["prompt_tokens"]) if self.image_tokens is not None else None
            routed = []
            if self.asks_experts and experts is not None and pairs:
                # The last token was sampled and not read.
                read = len(self.request.token_ids) + len(self.token_ids) + len(pairs) - 1
                routed.append(experts.read(meta.get("routed_experts"), read - self.experts_from))
        except EngineError:
            raise
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(
                f"{server}: the response to {self.request.request_id} is invalid: {type(error).__name__}: {error}. It is "
                f"{str(reply)[:300]}"
            ) from error
        self._check(pairs, spans, expected_version, vocab_size, server)
        sent = len(self.request.token_ids) + len(self.token_ids)
        if prompt_tokens is not None and prompt_tokens != sent and reason is not FinishReason.ABORT:
            raise EngineRefused(
                f"{server}: it read {prompt_tokens} tokens, but request {self.request.request_id} has {sent}: it computes "
                "other image features than the run, or tokenizes the prompt again. Use the run's model folder for it, and do "
                "not disable SGLANG_MM_AVOID_RETOKENIZE."
            )
        offset = len(self.token_ids)
        self.token_ids += [token for _, token in pairs]
        self.log_probs += [log_prob for log_prob, _ in pairs]
        for version, start, end in spans:
            self._add_span(version, start + offset, end + offset)
        if not self.part:
            self.cached_tokens = cached
        self.drafts = self.drafts + SpecDecodeStats.of(meta, len(pairs))
        self.routed_experts += routed
        return reason

    def _check(
        self,
        pairs: list[tuple[float, int]],
        spans: list[tuple[int, int, int]],
        expected_version: int | None,
        vocab_size: int,
        server: str,
    ) -> None:
        problem = ""
        room = self.request.sampling.max_new_tokens - len(self.token_ids)
        wrong = [token for _, token in pairs if not 0 <= token < vocab_size]
        odd = [log_prob for log_prob, _ in pairs if not (math.isfinite(log_prob) and log_prob <= SLACK)]
        versions = {version for version, _, _ in spans}
        if len(pairs) > room:
            problem = f"it has {len(pairs)} tokens, more than the {room} requested"
        elif wrong:
            problem = f"token {wrong[0]} is not in the model's vocabulary of {vocab_size}"
        elif odd:
            problem = f"{odd[0]} is not a log-prob"
        elif expected_version is not None and versions - {expected_version}:
            problem = (
                f"its tokens have version {', '.join(map(str, sorted(versions)))}, but the server was sent version "
                f"{expected_version}"
            )
        if problem:
            raise EngineError(f"{server}: the response to {self.request.request_id} is wrong: {problem}.")

    def _add_span(self, version: int, start: int, end: int) -> None:
        if start == end:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, end=end))

    def interrupt(self) -> None:
        """Prepares the next part. A stop string may begin in this part and end in the next, where SGLang checks only the
        new tokens: so the last tokens, as many as a stop string may have, are generated again."""
        longest = max((len(text) for text in self.request.sampling.stop), default=0)
        # SGLang begins a grammar again with every part.
        keep = max(0, len(self.token_ids) - longest) if self.request.sampling.structural_tag is None else 0
        if self.image_tokens is not None:
            keep = min(keep, self.image_tokens.first_in(self.token_ids))
        del self.token_ids[keep:], self.log_probs[keep:]
        self.spans = [
            VersionSpan(version=span.version, start=span.start, end=min(span.end, keep))
            for span in self.spans
            if span.start < keep
        ]
        if self.routed_experts:
            start = self.request.routed_experts_from or 0
            # If no token is kept, the prompt's experts are also chosen by the next part's weights.
            rows = max(0, len(self.request.token_ids) + keep - 1 - start) if keep else 0
            self.routed_experts = [np.concatenate(self.routed_experts)[:rows]]
        self.part += 1

    def completion(self, reason: FinishReason, engine_index: int) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            token_ids=np.asarray(self.token_ids, np.int32),
            log_probs=np.minimum(np.asarray(self.log_probs, np.float32), 0.0),
            finish_reason=reason,
            spans=tuple(self.spans),
            cached_tokens=self.cached_tokens,
            engine_index=engine_index,
            extra=self.drafts.metrics,
            routed_experts=np.concatenate(self.routed_experts) if self.routed_experts and self.token_ids else None,
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
    spans = [(version_of(span["version"]), int(span["start"]), int(span["end"])) for span in given]
    covered = [position for _, start, end in spans for position in range(start, end)]
    if covered != list(range(count)):
        raise ValueError(f"its version spans {spans} do not cover its {count} tokens")
    return spans
