"""Parses the body of POST /generate into requests, one for each sequence."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from slime_core.types.completion import SamplingParams
from slime_router.wire import DEFAULT_MAX_NEW_TOKENS, Fields, Origin, WireRequest, bad_request, fields_decoder, patched

PER_SEQUENCE: Final = frozenset(
    {
        "audio_data",
        "custom_logit_processor",
        "extra_key",
        "image_data",
        "input_embeds",
        "input_ids",
        "logprob_start_len",
        "lora_path",
        "return_hidden_states",
        "return_logprob",
        "rid",
        "sampling_params",
        "text",
        "token_ids_logprob",
        "top_logprobs_num",
        "video_data",
    }
)
"""Fields of a batch that may be lists with one entry per sequence."""

token_decoder: Final = msgspec.json.Decoder(list[int])


class Head(msgspec.Struct):
    """Fields of one sequence's request that the router reads; `input_ids` is parsed only if there are middlewares."""

    rid: str | None = None
    session_id: str | None = None
    text: str | None = None
    input_ids: msgspec.Raw = msgspec.Raw(b"null")
    sampling_params: dict[str, Any] | None = None
    priority: int | None = None
    stream: bool = False


head_decoder: Final = msgspec.json.Decoder(Head)


@dataclass(frozen=True, slots=True)
class Parsed:
    """One POST."""

    requests: tuple[WireRequest, ...]
    batch: bool
    """The response is a list, or has events with an `index`."""
    stream: bool


def parse(body: bytes, *, session_id: str | None, read_tokens: bool) -> Parsed:
    """Parses `body`. `read_tokens`: parse the prompt's tokens, for middlewares. Raises BadRequest with the problem."""
    try:
        fields = fields_decoder.decode(body)
        if not is_batch(fields):
            request, stream = one(body, session_id, read_tokens)
            return Parsed((request,), False, stream)
        found = [one(item, session_id, read_tokens) for item in split(fields)]
        return Parsed(tuple(request for request, _ in found), True, any(stream for _, stream in found))
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise bad_request(error) from None


def is_batch(fields: Fields) -> bool:
    text, input_ids = fields.get("text"), fields.get("input_ids")
    if text is not None and bytes(text).startswith(b"["):
        return True
    # A list of lists, recognized by its first characters.
    return input_ids is not None and bytes(input_ids)[1:].lstrip().startswith(b"[")


def split(fields: Fields) -> list[bytes]:
    """One body for each sequence."""
    lists: dict[str, list[msgspec.Raw]] = {}
    for name in PER_SEQUENCE & fields.keys():
        if bytes(fields[name]).startswith(b"["):
            lists[name] = msgspec.json.decode(fields[name], type=list[msgspec.Raw])
    prompts = lists.get("input_ids", lists.get("text", []))
    if not prompts:
        raise ValueError("an empty batch")
    for name, values in lists.items():
        if len(values) != len(prompts):
            raise ValueError(f"`{name}` has {len(values)} entries for {len(prompts)} sequences")
    shared = {name: value for name, value in fields.items() if name not in lists}
    rid = None if "rid" in lists or "rid" not in fields else msgspec.json.decode(fields["rid"], type=str | None)
    bodies = []
    for number in range(len(prompts)):
        item: dict[str, Any] = {**shared, **{name: values[number] for name, values in lists.items()}}
        if rid is not None:
            # SGLang's ids for the sequences of a batch.
            item["rid"] = f"{rid}_{number}"
        bodies.append(msgspec.json.encode(item))
    return bodies


def one(body: bytes, session_id: str | None, read_tokens: bool) -> tuple[WireRequest, bool]:
    head = head_decoder.decode(body)
    request_id = head.rid
    if request_id is None:
        # An abort needs the id.
        request_id = uuid.uuid4().hex
        body = patched(body, {"rid": request_id})
    params = head.sampling_params or {}
    if params.get("n", 1) != 1:
        raise ValueError("sampling_params.n above 1 is not served: send a batch with the prompt n times")
    token_ids = np.empty(0, np.int32)
    if read_tokens and bytes(head.input_ids) != b"null":
        token_ids = np.array(token_decoder.decode(head.input_ids), np.int32)
    sampling, seed, priority = sampling_of(params), int(params.get("sampling_seed") or 0), head.priority or 0
    request = WireRequest(
        request_id=request_id,
        token_ids=token_ids,
        sampling=sampling,
        seed=seed,
        session_id=session_id or head.session_id,
        priority=priority,
        text=head.text,
        origin=Origin(body, request_id, token_ids, sampling, seed, priority, params),
    )
    return request, head.stream


def sampling_of(params: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters for middlewares; the engine gets `params` unchanged."""
    names = SamplingParams.__dataclass_fields__.keys() & params.keys()
    known = {name: params[name] for name in names if params[name] is not None}
    if isinstance(stop := known.get("stop"), str):
        known["stop"] = (stop,)
    for name in ("stop", "stop_token_ids"):
        if name in known:
            known[name] = tuple(known[name])
    try:
        return msgspec.convert({"max_new_tokens": DEFAULT_MAX_NEW_TOKENS, **known}, SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling_params: {error}") from None
