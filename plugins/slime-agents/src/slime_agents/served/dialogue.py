"""Renders messages to the text that the model sees, and parses its text into a message."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from slime_core.data.chat_template import TEMPLATE_ERRORS, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL_CALL: Final = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""Tool calls in the format of the Hermes and Qwen families."""


class BadCall(Exception):
    """A call that cannot be served. The agent gets the reason as an error response."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantMessage:
    """The model's response as a message."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


class Dialogue:
    """Renders conversations with the tokenizer's chat template. Responses of the model are rendered as the model wrote them,
    not as the agent got them, which is parsed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._raw: dict[str, str] = {}

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """BadCall if a message cannot be shown to the model."""
        if not messages:
            raise BadCall("messages: there are none")
        shown = [self._shown(message) for message in messages]
        try:
            return render_chat(self._tokenizer, shown, tools=tools or None, template_kwargs=self._template_kwargs)
        except TEMPLATE_ERRORS as error:
            raise BadCall(f"the chat template does not take these messages: {error}") from error

    def parse(self, raw: str, *, turn: int, with_tools: bool, stop_sequence: str | None) -> AssistantMessage:
        """Parses `raw`: what the model wrote, without the end of its turn. A stop string of the agent's is removed."""
        message = parsed(raw, turn) if with_tools else AssistantMessage(content=raw)
        if stop_sequence is not None:
            message = replace(message, content=message.content.removesuffix(stop_sequence))
        self._raw[known_by(message.content, [call.id for call in message.tool_calls])] = raw
        return message

    def _shown(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadCall(f"messages: {message!r:.80}: must be an object with a role")
        role = "system" if message["role"] == "developer" else message["role"]
        content = text_of(message.get("content"))
        calls = message.get("tool_calls") or []
        if role == "assistant":
            raw = self._raw.get(known_by(content, [call.get("id", "") for call in calls]))
            if raw is not None:
                return {"role": role, "content": raw}
        shown = {key: value for key, value in message.items() if key in ("name", "tool_call_id") and value is not None}
        shown |= {"role": role, "content": content}
        if calls:
            shown["tool_calls"] = [with_object(call) for call in calls]
        return shown


def known_by(content: str, call_ids: Sequence[str]) -> str:
    """Key under which the raw text is kept. Tool calls have ids, so an agent may change the text beside them."""
    return json.dumps(["calls", *call_ids] if call_ids else ["text", content])


def text_of(content: Any) -> str:
    """The text of a string, or of a list of text parts. BadCall for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise BadCall(f"content: {content!r:.80}: must be a string or a list of parts")
    if other := {str(part.get("type")) for part in content} - {"text", "input_text", "output_text"}:
        raise BadCall(f"content: parts of type {', '.join(sorted(other))} cannot be shown to this model; text can")
    return "".join(str(part.get("text", "")) for part in content)


def with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call whose arguments are an object, as chat templates require."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except ValueError:
            raise BadCall(f"tool_calls: arguments are no JSON: {arguments:.80}") from None
    return {"id": call.get("id"), "type": "function", "function": function}


def parsed(raw: str, turn: int) -> AssistantMessage:
    """Parses the tool calls in the text. If one cannot be parsed, all of it stays plain text."""
    calls: list[ToolCall] = []
    for number, found in enumerate(TOOL_CALL.finditer(raw)):
        try:
            call = json.loads(found[1])
        except ValueError:
            return AssistantMessage(content=raw)
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return AssistantMessage(content=raw)
        calls.append(ToolCall(f"call_{turn}_{number}", name, json.dumps(arguments, ensure_ascii=False)))
    if not calls:
        return AssistantMessage(content=raw)
    return AssistantMessage(content=raw[: raw.index("<tool_call>")].strip(), tool_calls=tuple(calls))
