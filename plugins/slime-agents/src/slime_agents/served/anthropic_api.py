"""Anthropic's messages API: parses requests, formats responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field

from slime_agents.served.constraint import Constraint
from slime_agents.served.dialogue import BadCall
from slime_agents.served.openai_api import MODEL, StopText
from slime_agents.served.parameters import ADVICE, Parameters, refusal
from slime_agents.served.session import Call, Reply
from slime_core.types.completion import SamplingParams

UNSEEN: Final = frozenset({"thinking", "redacted_thinking"})
STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


TOOL_CHOICES: Final = ({"type": "auto"}, {"type": "none"})


class MessagesRequest(BaseModel):
    """The parameters that are used, as in ChatRequest."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: int | None = Field(None, gt=0)
    stop_sequences: list[StopText] | None = None
    stream: bool | None = False

    def call(self, sampling: SamplingParams, ignored: Sequence[str]) -> Call:
        """BadCall for a parameter that would not be respected."""
        PARAMETERS.check(self.model_extra or {}, sampling, ignored)
        choice = {key: value for key, value in (self.tool_choice or TOOL_CHOICES[0]).items() if value is not False}
        tools = None if choice == TOOL_CHOICES[1] else [function_of(tool) for tool in self.tools or []]
        constraint = None
        if choice not in TOOL_CHOICES and "tool_choice" not in ignored:
            if choice.get("type") not in ("any", "tool"):
                raise refusal("tool_choice", choice, ADVICE["parallel_tool_calls"])
            name = str(choice.get("name")) if choice["type"] == "tool" else None
            one = choice.get("disable_parallel_tool_use") is True
            constraint = Constraint.of_calls(choice, tools, name=name, one=one)
        if self.messages and self.messages[-1].get("role") == "assistant":
            raise BadCall(
                "messages: the last one is the assistant's, and a response that was begun is not continued here"
            )
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for given in self.messages:
            messages += plain_messages(given)
        return Call(
            messages=messages,
            tools=tools or None,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            constraint=constraint,
        )


PARAMETERS: Final = Parameters(
    used=frozenset(MessagesRequest.model_fields),
    no_effect=frozenset(["model", "metadata", "service_tier", "cache_control"]),
    defaults={"thinking": [{"type": "disabled"}]},
)


def function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise BadCall(f"tools: {tool.get('name')} has no input_schema; tools that a server runs are not to be had here")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description", ""),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def plain_messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Converts a message of blocks into messages that a chat template accepts."""
    role, content = given.get("role"), given.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise BadCall(f"content: {content!r:.80}: must be a string or a list of blocks")
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind not in UNSEEN:
            texts.append(block)
    messages = results
    if texts or calls or not results:
        message: dict[str, Any] = {"role": role, "content": texts}
        if calls:
            message["tool_calls"] = calls
        messages = [*results, message]
    return messages


def blocks(reply: Reply) -> list[dict[str, Any]]:
    written = reply.message
    text = [{"type": "text", "text": written.content}] if written.content or not written.tool_calls else []
    return [
        *text,
        *(
            {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
            for c in written.tool_calls
        ),
    ]


def stop_reason(reply: Reply) -> str:
    return STOP_REASONS[reply.finish] if reply.stop_sequence is None else "stop_sequence"


def message(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.number}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": blocks(reply),
        "stop_reason": stop_reason(reply),
        "stop_sequence": reply.stop_sequence,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.completion.token_ids)},
    }


def events(reply: Reply) -> Iterator[bytes]:
    """The response as server-sent events."""
    whole = message(reply)
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**whole["usage"], "output_tokens": 0}
    yield event("message_start", {"message": begun})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield event("content_block_start", {"index": index, "content_block": empty})
        yield event("content_block_delta", {"index": index, "delta": delta})
        yield event("content_block_stop", {"index": index})
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield event("message_delta", {"delta": ended, "usage": {"output_tokens": whole["usage"]["output_tokens"]}})
    yield event("message_stop", {})


def event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


def error(text: str, code: str, parameter: str | None = None) -> dict[str, Any]:
    return {"type": "error", "error": {"type": code, "message": text}}
