"""OpenAI's responses API: parses requests, formats responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field

from slime_agents.served.constraint import Constraint
from slime_agents.served.dialogue import BadCall
from slime_agents.served.openai_api import MODEL, TextOf, chosen_call
from slime_agents.served.parameters import Parameters
from slime_agents.served.session import Call, Reply
from slime_core.types.completion import SamplingParams

Items = Sequence[Mapping[str, Any]]
Stored = Mapping[str, Items]
"""The items of each stored response: its input and its output."""

LOG_PROBS: Final = "message.output_text.logprobs"
INCLUDED: Final = frozenset([LOG_PROBS, "reasoning.encrypted_content"])
"""No response has reasoning items, so including their content changes nothing."""
PLAIN: Final[Mapping[str, Any]] = {"format": {"type": "text"}, "verbosity": "medium"}


class ResponsesRequest(BaseModel):
    """The parameters that are used, as in ChatRequest."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = Field(None, gt=0)
    previous_response_id: str | None = None
    store: bool | None = True
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    metadata: dict[str, str] | None = None
    skip_special_tokens: bool | None = True
    """An extension of vLLM."""

    def items(self, stored: Stored) -> list[Mapping[str, Any]]:
        """All items up to this request's. BadCall if it refers to one that is not stored."""
        given: Items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        before: Items = ()
        if self.previous_response_id is not None:
            found = stored.get(self.previous_response_id)
            if found is None:
                raise BadCall(
                    f'previous_response_id = "{self.previous_response_id}": there is no such response in this episode. '
                    "Responses are stored unless store = false, and a thread of calls has only its own",
                    parameter="previous_response_id",
                )
            before = found
        known = {item["id"]: item for items in stored.values() for item in items if "id" in item}
        return [*before, *(referred(item, known) for item in given)]

    def call(self, items: Items, sampling: SamplingParams, ignored: Sequence[str]) -> Call:
        """BadCall for a parameter that would not be respected."""
        PARAMETERS.check(self.model_extra or {}, sampling, ignored)
        if others := sorted(set(self.include or []) - INCLUDED):
            PARAMETERS.refuse("include", others, ignored, f"Supported are {', '.join(sorted(INCLUDED))}")
        if others := sorted(set(self.stream_options or {}) - {"include_obfuscation"}):
            raise BadCall(f"stream_options: {', '.join(others)}: not supported here", parameter="stream_options")
        tools = None if self.tool_choice == "none" else [function_of(tool) for tool in self.tools or []]
        form = self.text or {}
        if any(form[name] not in (None, PLAIN.get(name)) for name in set(form) - {"format"}):
            PARAMETERS.refuse("text", self.text, ignored)
        constraint = None
        if (chosen := form.get("format")) and "text" not in ignored:
            constraint = Constraint.of_format("text", chosen, chosen.get("schema"), tools)
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        constraint = chosen_call(self.tool_choice, tools, self.parallel_tool_calls, ignored) or constraint
        return Call(
            messages=[*instructions, *messages_of(items)],
            tools=tools or None,
            max_tokens=self.max_output_tokens,
            constraint=constraint,
            skip_special_tokens=self.skip_special_tokens is not False,
        )


PARAMETERS: Final = Parameters(
    used=frozenset(ResponsesRequest.model_fields),
    no_effect=frozenset(
        [
            "model", "user", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
            "safety_identifier", "max_tool_calls",
        ]
    ),
    defaults={
        "background": [False],
        "reasoning": [{}],
        "top_logprobs": [0],
        "truncation": ["disabled"],
    },
)  # fmt: skip


def referred(item: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The item, or the one that it refers to."""
    if item.get("type") != "item_reference":
        return item
    if item.get("id") not in known:
        raise BadCall(f"input: item_reference {item.get('id')!r:.80}: there is no such item in a stored response")
    return known[item["id"]]


def function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool in the form that chat templates accept."""
    if tool.get("type") != "function":
        raise BadCall(
            f"tools: {tool.get('type')}: tools that a server runs are not to be had here; functions are",
            parameter="tools",
        )
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def messages_of(items: Items) -> list[dict[str, Any]]:
    """Converts items into messages. A message of the assistant and the calls after it are one message, as the model wrote
    them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            raise BadCall(f"input: items of type {kind} cannot be shown to this model", parameter="input")
    return messages


def output(reply: Reply, request: ResponsesRequest, text_of: TextOf) -> list[dict[str, Any]]:
    """The items of a response: a message if it has text, and a call for each tool call."""
    written = reply.message
    status = "incomplete" if reply.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if written.content or not written.tool_calls:
        shown = log_probs(reply, text_of) if LOG_PROBS in (request.include or ()) else []
        text = {"type": "output_text", "text": written.content, "annotations": [], "logprobs": shown}
        items.append(
            {
                "id": f"msg_{reply.number}", "type": "message", "role": "assistant", "status": status, "content": [text],
            }
        )  # fmt: skip
    items += [
        {
            "id": f"fc_{reply.number}_{number}", "type": "function_call", "call_id": call.id, "name": call.name,
            "arguments": call.arguments, "status": status,
        }
        for number, call in enumerate(written.tool_calls)
    ]  # fmt: skip
    return items


def log_probs(reply: Reply, text_of: TextOf) -> list[dict[str, Any]]:
    """Log-probs of all sampled tokens of the response, which tool calls and the end of the turn belong to."""
    pairs = zip(reply.completion.token_ids.tolist(), reply.completion.log_probs.tolist(), strict=True)
    texts = [(text_of([token]), value) for token, value in pairs]
    return [
        # A token may be a part of a character: its bytes are not those of the replacement character.
        {"token": text, "bytes": [] if "\ufffd" in text else list(text.encode()), "logprob": value, "top_logprobs": []}
        for text, value in texts
    ]


def response(
    reply: Reply, request: ResponsesRequest, sampling: SamplingParams, text_of: TextOf, created: int
) -> dict[str, Any]:
    is_cut = reply.finish == "length"
    written = len(reply.completion.token_ids)
    return {
        "id": f"resp_{reply.number}",
        "object": "response",
        "created_at": created,
        "completed_at": None if is_cut else created,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": MODEL,
        "output": output(reply, request, text_of),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "temperature": sampling.temperature,
        "text": {**PLAIN, **(request.text or {})},
        "tool_choice": request.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in request.tools or []],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.completion.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + written,
        },
    }


def events(whole: Mapping[str, Any]) -> Iterator[bytes]:
    """The response as server-sent events, numbered from 0."""
    for number, (kind, data) in enumerate(numbered(whole)):
        yield f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **data})}\n\n".encode()


def numbered(whole: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {
        **whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None, "completed_at": None,
    }  # fmt: skip
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index}
        at = {**place, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            empty = {**part, "text": "", "logprobs": []}
            at_part = {**at, "content_index": 0}
            yield "response.output_item.added", {**place, "item": {**item, "status": "in_progress", "content": []}}
            yield "response.content_part.added", {**at_part, "part": empty}
            yield "response.output_text.delta", {**at_part, "delta": part["text"], "logprobs": part["logprobs"]}
            yield "response.output_text.done", {**at_part, "text": part["text"], "logprobs": part["logprobs"]}
            yield "response.content_part.done", {**at_part, "part": part}
        else:
            begun_item = {**item, "status": "in_progress", "arguments": ""}
            done = {**at, "name": item["name"], "arguments": item["arguments"]}
            yield "response.output_item.added", {**place, "item": begun_item}
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            yield "response.function_call_arguments.done", done
        yield "response.output_item.done", {**place, "item": item}
    yield f"response.{whole['status']}", {"response": whole}
