"""Parsing of SGLang's /generate, limited to what middlewares need.

A request is short and is parsed, but its bytes are forwarded unchanged unless a middleware changed it. A response is long
(a thousand tokens with log-probs): its bytes are forwarded, and parsed only when a middleware reads a field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams
from slime_core.types.sample import VersionSpan
from slime_router.errors import BadRequest, BadResponse

DEFAULT_MAX_NEW_TOKENS: Final = 128
"""SGLang's default."""
READ: Final = frozenset({"rid", "text", "input_ids", "sampling_params", "session_id", "priority", "stream"})
"""Fields of a request's body that are parsed, or do not change the response."""
READ_PARAMS: Final = frozenset({"sampling_seed", "n"})
NO_VERSION: Final = -1
"""Version of an engine whose weights have no number."""

Fields = dict[str, msgspec.Raw]
"""Fields of a JSON object, their values not parsed."""


class Meta(msgspec.Struct):
    """`meta_info` of a response."""

    finish_reason: dict[str, Any] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    weight_version: str | int | None = None
    weight_versions: list[dict[str, Any]] | None = None
    cached_tokens: int = 0
    completion_tokens: int | None = None


class EngineResponse(msgspec.Struct):
    """One response of an engine, or one event of a stream."""

    meta_info: Meta
    output_ids: list[int] | None = None


fields_decoder: Final = msgspec.json.Decoder(Fields)
response_decoder: Final = msgspec.json.Decoder(EngineResponse)


def patched(body: bytes, changes: Mapping[str, Any], *, without: Sequence[str] = ()) -> bytes:
    """The JSON object with `changes` set and the fields `without` removed; other fields are copied without parsing."""
    fields: dict[str, Any] = dict(fields_decoder.decode(body))
    for name in without:
        fields.pop(name, None)
    return msgspec.json.encode({**fields, **changes})


class Origin(NamedTuple):
    """A request as it arrived. Values that differ when it is forwarded were changed by a middleware."""

    body: bytes
    request_id: str
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    seed: int
    priority: int
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WireRequest(GenerateRequest):
    """A request that arrived over HTTP."""

    origin: Origin

    @property
    def unread(self) -> dict[str, Any]:
        """Fields of the body that this class does not have, such as images, adapters and grammars."""
        fields = fields_decoder.decode(self.origin.body)
        left = {name: fields[name] for name in sorted(fields.keys() - READ) if bytes(fields[name]) != b"null"}
        names = sorted(self.origin.params.keys() - SamplingParams.__dataclass_fields__.keys() - READ_PARAMS)
        params = {name: self.origin.params[name] for name in names if self.origin.params[name] is not None}
        return {**left, "sampling_params": params} if params else left

    def outgoing(self) -> bytes:
        """The bytes of the request, with the changes of middlewares."""
        origin = self.origin
        changes: dict[str, Any] = {}
        if self.token_ids is not origin.token_ids:
            changes["input_ids"] = self.token_ids.tolist()
        if self.request_id != origin.request_id:
            changes["rid"] = self.request_id
        if self.priority != origin.priority:
            changes["priority"] = self.priority
        params = dict(origin.params)
        if self.sampling != origin.sampling:
            for name in SamplingParams.__dataclass_fields__:
                if (value := getattr(self.sampling, name)) != getattr(origin.sampling, name):
                    params[name] = value
        if self.seed != origin.seed:
            params["sampling_seed"] = self.seed
        if params != origin.params:
            changes["sampling_params"] = params
        if not changes:
            return origin.body
        return patched(origin.body, changes, without=("text",) if "input_ids" in changes else ())


class WireCompletion(Completion):
    """A response that is parsed when a field is read. `dataclasses.replace` returns a plain Completion."""

    __slots__ = ("_parts", "_read")
    _parts: Sequence[bytes]
    _read: Completion | None

    def __new__(cls, **fields: Any) -> Completion:  # type: ignore[misc]  # see above
        return Completion(**fields)

    @classmethod
    def of(cls, parts: Sequence[bytes], *, request_id: str, engine_index: int) -> WireCompletion:
        """`parts`: one whole response, or the events of a stream that each contain only the new tokens."""
        self: WireCompletion = object.__new__(cls)
        for name, value in (
            ("request_id", request_id),
            ("engine_index", engine_index),
            ("queue_s", 0.0),
            ("prompt_token_ids", None),
            # Expert ids stay in the bytes and are not parsed.
            ("routed_experts", None),
            ("_parts", parts),
            ("_read", None),
        ):
            object.__setattr__(self, name, value)
        return self

    @property
    def body(self) -> bytes:
        """The response as one JSON object."""
        return self._parts[0] if len(self._parts) == 1 else joined(self._parts)

    @property
    def read(self) -> Completion:
        """The parsed response. Raises BadResponse if it cannot be parsed."""
        if self._read is not None:
            return self._read
        whole = read_response(self.body, request_id=self.request_id, engine_index=self.engine_index)
        object.__setattr__(self, "_read", whole)
        return whole

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return self.read.token_ids

    @property
    def log_probs(self) -> npt.NDArray[np.float32]:
        return self.read.log_probs

    @property
    def finish_reason(self) -> FinishReason:
        return self.read.finish_reason

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        return self.read.spans

    @property
    def cached_tokens(self) -> int:
        return self.read.cached_tokens

    @property
    def extra(self) -> dict[str, float]:
        return self.read.extra


def read_response(body: bytes, *, request_id: str, engine_index: int) -> Completion:
    """Parses a response. Log-probs that were not requested are NaN, an unknown version is -1. Raises BadResponse."""
    try:
        response = response_decoder.decode(body)
        meta = response.meta_info
        if meta.output_token_logprobs is not None:
            entries = meta.output_token_logprobs
            token_ids = np.array([entry[1] for entry in entries], np.int32)
            log_probs = np.array([np.nan if entry[0] is None else entry[0] for entry in entries], np.float32)
        elif response.output_ids is not None:
            token_ids = np.array(response.output_ids, np.int32)
            log_probs = np.full(len(token_ids), np.nan, np.float32)
        else:
            raise ValueError("it has neither output_ids nor meta_info.output_token_logprobs")
        if response.output_ids is not None and not np.array_equal(token_ids, response.output_ids):
            raise ValueError("output_ids and output_token_logprobs have different tokens")
        if meta.finish_reason is None:
            raise ValueError("it has no finish_reason")
        return Completion(
            request_id=request_id,
            token_ids=token_ids,
            log_probs=log_probs,
            finish_reason=FinishReason(meta.finish_reason["type"]),
            spans=read_spans(meta, len(token_ids)),
            cached_tokens=meta.cached_tokens,
            engine_index=engine_index,
        )
    except (ValueError, KeyError, OverflowError) as error:
        raise BadResponse(
            f"engine {engine_index}, request {request_id}: what came back is no response to /generate: {error}. It begins "
            f"with {body[:80].decode(errors='replace')!r}"
        ) from None


def read_spans(meta: Meta, num_tokens: int) -> tuple[VersionSpan, ...]:
    if meta.weight_versions is not None:
        spans = ((version_of(span["version"]), int(span["start"]), int(span["end"])) for span in meta.weight_versions)
        return tuple(VersionSpan(*span) for span in spans)
    return (VersionSpan(version_of(meta.weight_version), 0, num_tokens),) if num_tokens else ()


def version_of(text: str | int | None) -> int:
    """SGLang's version is a string, "default" until an update of the weights sets a number."""
    return int(text) if text is not None and str(text).isdecimal() else NO_VERSION


def joined(events: Sequence[bytes]) -> bytes:
    """The whole response, from events that each contain only the new tokens."""
    try:
        responses = [response_decoder.decode(event) for event in events]
        fields: dict[str, Any] = dict(fields_decoder.decode(events[-1]))
        texts = [fields_decoder.decode(event).get("text") for event in events]
        meta: dict[str, Any] = dict(fields_decoder.decode(fields["meta_info"]))
    except (msgspec.MsgspecError, KeyError) as error:
        raise BadResponse(f"an event of a stream is no response to /generate: {error}") from None
    fields["output_ids"] = [token for response in responses for token in response.output_ids or ()]
    if all(text is not None for text in texts):
        fields["text"] = "".join(msgspec.json.decode(text, type=str) for text in texts if text is not None)
    entries = [entry for response in responses for entry in response.meta_info.output_token_logprobs or ()]
    if len(entries) == len(fields["output_ids"]):
        meta["output_token_logprobs"] = entries
    return msgspec.json.encode({**fields, "meta_info": meta})


def response_body(completion: Completion, received: WireCompletion | None) -> bytes:
    """The body that the caller gets. `received`: the engine's response, None if no engine was called."""
    if isinstance(completion, WireCompletion):
        return completion.body
    fields: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    if received is not None:
        fields = dict(fields_decoder.decode(received.body))
        meta = dict(fields_decoder.decode(fields["meta_info"]))
    read = None if received is None else received.read
    if read is None or completion.token_ids is not read.token_ids or completion.log_probs is not read.log_probs:
        # Only the text of the engine's own tokens is known.
        fields.pop("text", None)
        fields["output_ids"] = completion.token_ids.tolist()
        log_probs = [None if np.isnan(value) else value for value in completion.log_probs.tolist()]
        meta["output_token_logprobs"] = list(
            zip(log_probs, fields["output_ids"], (None,) * len(log_probs), strict=True)
        )
        meta["completion_tokens"] = len(log_probs)
    if read is None or completion.finish_reason is not read.finish_reason:
        meta["finish_reason"] = {"type": completion.finish_reason.value}
    if read is None or completion.spans != read.spans:
        meta["weight_versions"] = [span._asdict() for span in completion.spans]
        meta["weight_version"] = str(completion.spans[-1].version) if completion.spans else None
    if completion.prompt_token_ids is not None:
        meta["prompt_token_ids"] = completion.prompt_token_ids.tolist()
    meta = {"id": completion.request_id, "cached_tokens": completion.cached_tokens, **meta}
    return msgspec.json.encode({**fields, "meta_info": meta})


def bad_request(error: Exception) -> BadRequest:
    return BadRequest(f"the body of POST /generate: {error}")
