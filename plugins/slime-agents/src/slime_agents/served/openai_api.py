"""OpenAI's chat completions API: parses requests, formats responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from slime_agents.served.constraint import Constraint, Tools
from slime_agents.served.dialogue import BadCall
from slime_agents.served.parameters import ADVICE, Parameters, refusal
from slime_agents.served.session import Call, Reply
from slime_core.types.completion import SamplingParams

MODEL: Final = "slime"
TextOf: TypeAlias = Callable[[Sequence[int]], str]


TOOL_CHOICES: Final = ("auto", "none")
STREAM_OPTIONS: Final = frozenset({"include_usage", "include_obfuscation"})
"""The second only pads what is sent."""
StopText: TypeAlias = Annotated[str, Field(min_length=1)]


class ChatRequest(BaseModel):
    """The parameters that are used. `call` checks the others."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    stop: StopText | list[StopText] | None = None
    n: int | None = Field(1, ge=1, le=128)
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = False
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    skip_special_tokens: bool | None = True
    """An extension of SGLang and vLLM."""

    def call(self, sampling: SamplingParams, ignored: Sequence[str]) -> Call:
        """BadCall for a parameter that would not be respected."""
        PARAMETERS.check(self.model_extra or {}, sampling, ignored)
        tools = None if self.tool_choice == "none" else self.tools
        constraint = None
        if (chosen := self.response_format) is not None and "response_format" not in ignored:
            schema = (chosen.get("json_schema") or {}).get("schema")
            constraint = Constraint.of_format("response_format", chosen, schema, tools)
        # Where a call is required, there is no text that could have the format.
        constraint = chosen_call(self.tool_choice, tools, self.parallel_tool_calls, ignored) or constraint
        if others := sorted(set(self.stream_options or {}) - STREAM_OPTIONS):
            raise BadCall(f"stream_options: {', '.join(others)}: not supported here", parameter="stream_options")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return Call(
            messages=self.messages,
            tools=tools,
            max_tokens=min(limits, default=None),
            stop=tuple(stop),
            constraint=constraint,
            skip_special_tokens=self.skip_special_tokens is not False,
        )


def chosen_call(choice: Any, tools: Tools | None, parallel: bool | None, ignored: Sequence[str]) -> Constraint | None:
    """The constraint of `tool_choice`; None: the model chooses. BadCall for what cannot be respected."""
    one = parallel is False and "parallel_tool_calls" not in ignored
    if choice not in (None, *TOOL_CHOICES) and "tool_choice" not in ignored:
        if choice == "required":
            return Constraint.of_calls(choice, tools, name=None, one=one)
        if isinstance(choice, Mapping) and choice.get("type") == "function":
            return Constraint.of_calls(choice, tools, name=str((choice.get("function") or choice).get("name")), one=one)
        raise refusal("tool_choice", choice, 'There are "auto", "none", "required" and a function')
    if one and tools and choice != "none":
        raise refusal("parallel_tool_calls", parallel, ADVICE["parallel_tool_calls"])
    return None


PARAMETERS: Final = Parameters(
    used=frozenset(ChatRequest.model_fields),
    no_effect=frozenset(
        ["model", "user", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"]
    ),
    defaults={
        "frequency_penalty": [0],
        "presence_penalty": [0],
        "logit_bias": [{}],
        "top_logprobs": [0],
        "modalities": [["text"]],
        "store": [False],
    },
)


def message(reply: Reply) -> dict[str, Any]:
    written = reply.message
    shown: dict[str, Any] = {"role": "assistant", "content": written.content, "refusal": None}
    if written.tool_calls:
        shown["content"] = written.content or None
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in written.tool_calls
        ]
    return shown


def chat_completion(replies: list[Reply], request: ChatRequest, text_of: TextOf, created: int) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{replies[0].number}",
        "object": "chat.completion",
        "created": created,
        "model": MODEL,
        "choices": [
            {
                "index": index,
                "message": message(reply),
                "finish_reason": reply.finish,
                "logprobs": log_probs(reply, text_of) if request.logprobs else None,
            }
            for index, reply in enumerate(replies)
        ],
        "usage": usage(replies),
    }


def usage(replies: list[Reply]) -> dict[str, int]:
    written = sum(len(reply.completion.token_ids) for reply in replies)
    prompt = replies[0].prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def log_probs(reply: Reply, text_of: TextOf) -> dict[str, Any]:
    """Log-probs of the sampled tokens only."""
    pairs = zip(reply.completion.token_ids.tolist(), reply.completion.log_probs.tolist(), strict=True)
    return {"content": [log_prob(text_of([token]), value) for token, value in pairs], "refusal": None}


def log_prob(token: str, value: float) -> dict[str, Any]:
    # A token may be a part of a character: its bytes are not those of the replacement character.
    known = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": value, "bytes": known, "top_logprobs": []}


def events(replies: list[Reply], request: ChatRequest, text_of: TextOf, created: int) -> Iterator[bytes]:
    """The responses as server-sent events."""
    head = {
        "id": f"chatcmpl-{replies[0].number}",
        "object": "chat.completion.chunk",
        "created": created,
        "model": MODEL,
    }
    for index, reply in enumerate(replies):
        delta = message(reply)
        for number, call in enumerate(delta.get("tool_calls", [])):
            call["index"] = number
        shown = log_probs(reply, text_of) if request.logprobs else None
        yield event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None, "logprobs": shown}]})
        ended = {"index": index, "delta": {}, "finish_reason": reply.finish, "logprobs": None}
        yield event({**head, "choices": [ended]})
    if (request.stream_options or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(replies)})
    yield b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def error(text: str, code: str, parameter: str | None = None) -> dict[str, Any]:
    return {"error": {"message": text, "type": code, "param": parameter, "code": code}}
