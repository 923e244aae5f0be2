"""One request on its way: what is sent, what comes back, and what there is when it goes on under new weights."""

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
"""SGLang's word for the weights that it started with."""
BAD_REQUEST: Final = 400
SEED_BITS: Final = (1 << 63) - 1
SLACK: Final = 1e-3
"""What rounding may put a log-prob above 0."""


def version_of(label: object) -> int:
    """-1 for the weights that a server started with. ValueError for a label that slime has not given."""
    return -1 if label == INITIAL else int(str(label))


class RequestIds:
    """Ids for SGLang: they begin with ours, and none is used twice or begins another.

    SGLang aborts all that begins with an aborted id, and sometimes what has the id of an answer just given.
    """

    def __init__(self) -> None:
        self._start = secrets.token_hex(4)
        self._count = itertools.count()

    def next_for(self, request_id: str) -> str:
        return f"{request_id}#{self._start}-{next(self._count)}."


@dataclass(frozen=True, slots=True)
class Drafts:
    """What speculative decoding did for an answer; parts of it add up."""

    verified: int = 0
    """Forward passes of the model itself."""
    proposed: int = 0
    accepted: int = 0
    written: int = 0
    """Tokens that those passes gave, one of each being the model's own."""

    @classmethod
    def of(cls, meta: Mapping[str, Any], written: int) -> Drafts:
        """Nothing where the server does not speculate. Servers before 0.5.20 know the counts by other names."""
        verified = int(meta.get("spec_verify_ct") or 0)
        if not verified:
            return cls()
        proposed = first_of(meta, "spec_num_proposed_drafts", "spec_proposed_drafts")
        accepted = first_of(meta, "spec_num_correct_drafts", "spec_accepted_drafts")
        return cls(verified=verified, proposed=proposed, accepted=accepted, written=written)

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(
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
    """A request, and its answer so far."""

    request: GenerateRequest
    image_tokens: ImageTokens | None = None
    """Of the model, for a request with images."""
    rid: str = ""
    """Of the part that is on a server."""
    part: int = 0
    """How often it was broken off."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    drafts: Drafts = field(default_factory=Drafts)
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    """Of the tokens from the request's `routed_experts_from` on, a piece for each part."""
    sweep: int = 0
    """How often the engine was done with aborting everything when this part was sent."""
    aborted: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by an abort, for a request that waits here, and when there is an answer."""

    def body(self, room: int) -> dict[str, Any]:
        """For /generate; at most `room` more tokens."""
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
        if least >= budget:
            # Nothing may end it early. SGLang's own way would leave the end tokens out of the distribution, and the
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
        """Adds a part of the answer. EngineError for anything that cannot be an answer. `expected_version`: of all of
        its tokens, where no weights can have changed meanwhile. `experts`: where their ids may be asked for."""
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
                f"{server}: the answer to {self.request.request_id} is none: {type(error).__name__}: {error}; it says "
                f"{str(reply)[:300]}"
            ) from error
        self._check(pairs, spans, expected_version, vocab_size, server)
        sent = len(self.request.token_ids) + len(self.token_ids)
        if prompt_tokens is not None and prompt_tokens != sent and reason is not FinishReason.ABORT:
            raise EngineRefused(
                f"{server}: it read {prompt_tokens} tokens where request {self.request.request_id} has {sent}: it makes other "
                "features of the images than the run does, or reads the prompt's text anew. Use the run's model folder for it, "
                "and do not switch SGLANG_MM_AVOID_RETOKENIZE off."
            )
        offset = len(self.token_ids)
        self.token_ids += [token for _, token in pairs]
        self.log_probs += [log_prob for log_prob, _ in pairs]
        for version, start, end in spans:
            self._add_span(version, start + offset, end + offset)
        if not self.part:
            self.cached_tokens = cached
        self.drafts = self.drafts + Drafts.of(meta, len(pairs))
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
            problem = f"it has {len(pairs)} tokens, and may have {room}"
        elif wrong:
            problem = f"token {wrong[0]} is not among the model's {vocab_size}"
        elif odd:
            problem = f"{odd[0]} is no log-prob"
        elif expected_version is not None and versions - {expected_version}:
            problem = (
                f"its tokens are said to be of version {', '.join(map(str, sorted(versions)))}, but the server was given "
                f"version {expected_version}"
            )
        if problem:
            raise EngineError(f"{server}: the answer to {self.request.request_id} cannot be right: {problem}.")

    def _add_span(self, version: int, start: int, end: int) -> None:
        if start == end:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, end=end))

    def break_off(self) -> None:
        """Makes ready for the next part. A stop string may begin in this part and end in the next, where SGLang looks
        at its own tokens only: as many as may belong to one are written again."""
        longest = max((len(text) for text in self.request.sampling.stop), default=0)
        keep = max(0, len(self.token_ids) - longest)
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
            # Where nothing is kept, the next part's weights choose for the prompt too.
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


def finish_reason(said: Mapping[str, Any] | None, server: str) -> FinishReason:
    kind = None if said is None else said["type"]
    if kind == "abort" and said is not None and said.get("status_code") not in (None, 200):
        # SGLang's word for a request that it could not serve, be it the request's fault or its own.
        kind_of = EngineRefused if said["status_code"] == BAD_REQUEST else EngineError
        raise kind_of(f"{server}: refused a request: {said.get('message')}")
    try:
        return FinishReason(str(kind))
    except ValueError:
        raise EngineError(f'{server}: an answer ends with reason "{kind}", which slime does not know.') from None


def spans_of(meta: Mapping[str, Any], count: int) -> list[tuple[int, int, int]]:
    """(version, start, end) over the tokens of an answer; one span where the server tells only the last version."""
    said = meta.get("weight_versions")
    if not count:
        return []
    if said is None:
        return [(version_of(meta["weight_version"]), 0, count)]
    spans = [(version_of(span["version"]), int(span["start"]), int(span["end"])) for span in said]
    covered = [position for _, start, end in spans for position in range(start, end)]
    if covered != list(range(count)):
        raise ValueError(f"its version spans {spans} do not cover its {count} tokens")
    return spans
