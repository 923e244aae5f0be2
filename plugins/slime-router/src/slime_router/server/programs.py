"""What serves behind the router: SGLang, whose form of requests the router has, or vLLM, to whose form they are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from slime_router.errors import BadRequest, BadResponse
from slime_router.server.settings import ProgramName
from slime_router.wire import READ, WireRequest, fields_decoder


class Abort(msgspec.Struct, omit_defaults=True):
    """Body of POST /abort_request, as in SGLang."""

    rid: str | None = None
    abort_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    generate: str
    """Path of requests."""
    abort: str
    streams: bool
    outgoing: Callable[[WireRequest], bytes]
    """The body for an upstream. Raises BadRequest for what it does not serve."""
    incoming: Callable[[bytes], bytes]
    """A response, in SGLang's form. Raises BadResponse."""
    abort_body: Callable[[Abort], bytes]


SAMPLING: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    **{
        name: name
        for name in (
            "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "stop",
            "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "n",
        )
    },
}  # fmt: skip
"""vLLM's names of sampling parameters, by SGLang's."""
DEFAULTS: Final[Mapping[str, Any]] = {"max_tokens": 128}
"""SGLang's, where vLLM has others."""
SERVED: Final = READ | {"return_logprob", "logprob_start_len"}
PREFIX: Final = "generate-tokens-"
"""vLLM puts it before the ids of requests."""


def to_vllm(request: WireRequest) -> bytes:
    fields = fields_decoder.decode(request.outgoing())
    given = {name: msgspec.json.decode(value) for name, value in fields.items()}
    params = dict(given.get("sampling_params") or {})
    tag = params.pop("structural_tag", None)
    unserved = [name for name in sorted(given.keys() - SERVED) if given[name] not in (None, False)]
    unserved += [
        f"sampling_params.{name}" for name in sorted(params.keys() - SAMPLING.keys()) if params[name] is not None
    ]
    if given.get("logprob_start_len") not in (None, -1):
        unserved.append("logprob_start_len")
    if unserved:
        raise BadRequest(f"request {request.request_id}: not served by vLLM behind this router: {', '.join(unserved)}")
    if given.get("input_ids") is None:
        raise BadRequest(f"request {request.request_id}: vLLM takes token ids here: send input_ids, or use radix_cache")
    sampling = {SAMPLING[name]: value for name, value in params.items() if value is not None}
    if tag is not None:
        sampling["structured_outputs"] = {"structural_tag": tag}
    if given.get("return_logprob"):
        sampling["logprobs"] = 0
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": given["input_ids"],
        "sampling_params": {**DEFAULTS, **sampling},
        "stream": False,
    }
    if given.get("priority"):
        # In vLLM lower values are served first.
        body["priority"] = -given["priority"]
    return msgspec.json.encode(body)


def from_vllm(body: bytes) -> bytes:
    try:
        response = msgspec.json.decode(body)
        (choice,) = response["choices"]
        token_ids = choice["token_ids"] or []
        meta = {
            "id": response["request_id"].removeprefix(PREFIX),
            "finish_reason": {"type": choice["finish_reason"]},
            "weight_versions": choice.get("weight_versions") or [],
            "completion_tokens": len(token_ids),
        }
        meta["weight_version"] = meta["weight_versions"][-1]["version"] if meta["weight_versions"] else None
        if choice.get("logprobs"):
            meta["output_token_logprobs"] = [
                (entry["logprob"], entry["token_id"], None) for entry in choice["logprobs"]["content"] or ()
            ]
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadResponse(
            f"what came back is no response of vLLM: {type(error).__name__}: {error}. It begins with {body[:80]!r}"
        ) from None
    return msgspec.json.encode({"output_ids": token_ids, "meta_info": meta})


def abort_of_vllm(asked: Abort) -> bytes:
    return msgspec.json.encode({} if asked.abort_all or asked.rid is None else {"request_ids": [PREFIX + asked.rid]})


PROGRAMS: Final[Mapping[ProgramName, Program]] = {
    ProgramName.SGLANG: Program(
        generate="/generate",
        abort="/abort_request",
        streams=True,
        outgoing=WireRequest.outgoing,
        incoming=lambda body: body,
        abort_body=msgspec.json.encode,
    ),
    ProgramName.VLLM: Program(
        generate="/inference/v1/generate",
        abort="/abort_requests",
        streams=False,
        outgoing=to_vllm,
        incoming=from_vllm,
        abort_body=abort_of_vllm,
    ),
}
