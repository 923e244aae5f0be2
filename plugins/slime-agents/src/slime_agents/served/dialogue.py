"""Renders messages to the text that the model sees, and parses its text into a message."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from slime_agents.control_tokens import ControlTokens
from slime_sources.rendering.chat_template import TEMPLATE_ERRORS, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN: Final = re.compile(r"<tool_call>\s*(?=\{)")
END: Final = re.compile(r"\}\s*</tool_call>")
"""Tool calls in the format of the Hermes and Qwen families. With one pattern for all of it, a text of many beginnings would
take time that grows with its square."""


TOOL_TAGS: Final = frozenset(["<tool_call>", "</tool_call>"])
THINK_TAGS: Final = frozenset(["<think>", "</think>"])
"""Special tokens of some tokenizers. Agents get them nevertheless: they separate thoughts from the rest."""


class BadCall(Exception):
    """A call that cannot be served. The agent gets the reason as an error response."""

    def __init__(self, reason: str, *, parameter: str | None = None) -> None:
        """`parameter`: the one that is wrong, if it is one."""
        super().__init__(reason)
        self.parameter = parameter


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


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a message. Responses at two places may have the same content and be written with other tokens."""

    thread: str = ""
    before: str = ""
    """Digest of all messages before it."""
    last: str = ""
    """Digest of the last of them."""

    def after(self, message: Mapping[str, Any]) -> Place:
        """The place after this message."""
        last = digest(json.dumps(message))
        return Place(self.thread, digest(self.before + last), last)


class Dialogue:
    """Renders conversations with the tokenizer's chat template. Responses of the model are rendered as the model wrote them,
    not as the agent got them: parsed, and without special tokens. Control tokens in all other texts are marked (see
    ControlTokens)."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any], control: ControlTokens
    ) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._control = control
        self._raw: dict[str, dict[Place, str]] = {}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, thread: str = ""
    ) -> tuple[str, Place]:
        """The text, and the place of a response to it. BadCall if a message cannot be shown to the model."""
        if not messages:
            raise BadCall("messages: there are none")
        shown: list[dict[str, Any]] = []
        place = Place(thread)
        try:
            for message in messages:
                shown.append(self._shown(message, place))
                place = place.after(shown[-1])
            text = render_chat(
                self._tokenizer,
                shown,
                tools=self._control.plain_values(tools) if tools else None,
                template_kwargs=self._template_kwargs,
            )
        except TEMPLATE_ERRORS as error:
            raise BadCall(f"the chat template does not take these messages: {error}") from error
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadCall(f"messages: a text is not valid Unicode: {error}") from error
        return text, place

    def parse(
        self, token_ids: npt.NDArray[np.int32], place: Place, *, turn: int, with_tools: bool, skip_special_tokens: bool,
        stop_sequence: str | None,
    ) -> AssistantMessage:  # fmt: skip
        """The message of a response's tokens without the end of the turn. A stop string of the agent's is removed. At `place`,
        the response will be rendered with all its special tokens."""
        raw = self._control.decode(token_ids)
        tags = THINK_TAGS | TOOL_TAGS if with_tools else THINK_TAGS
        text = self._control.readable(token_ids, tags=tags) if skip_special_tokens else self._control.unmarked(raw)
        message = parsed(text, turn) if with_tools else AssistantMessage(content=text)
        if stop_sequence is not None:
            message = replace(message, content=message.content.removesuffix(stop_sequence))
        key = known_by(message.content, [call.id for call in message.tool_calls])
        self._raw.setdefault(key, {})[place] = raw
        return message

    def _raw_at(self, key: str, place: Place) -> str | None:
        """What the model wrote at this place, or at the one that is most like it if the agent changed earlier messages."""
        written = self._raw.get(key)
        if written is None:
            return None
        if place not in written:
            # The latest of those that are equally alike.
            nearest = max(
                reversed(written),
                key=lambda one: (one.before == place.before, one.thread == place.thread, one.last == place.last),
            )
            # Kept, so that later responses do not change how this conversation is rendered.
            written[place] = written[nearest]
        return written[place]

    def _shown(self, message: Mapping[str, Any], place: Place) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadCall(f"messages: {message!r:.80}: must be an object with a role")
        role = "system" if message["role"] == "developer" else message["role"]
        content = text_of(message.get("content"))
        calls = calls_of(message)
        if role == "assistant":
            raw = self._raw_at(known_by(content, [str(call.get("id", "")) for call in calls]), place)
            if raw is not None:
                return {"role": role, "content": raw}
            content = self._control.plain_response(content)
        else:
            content = self._control.plain(content)
        shown = {key: value for key, value in message.items() if key in ("name", "tool_call_id") and value is not None}
        if calls:
            shown["tool_calls"] = [with_object(call) for call in calls]
        return {**self._control.plain_values({**shown, "role": role}), "content": content}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def calls_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The tool calls in a message. BadCall if they are no list of objects with a function."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls
    ):
        raise BadCall(f"tool_calls: {calls!r:.80}: must be a list of objects with a function")
    return calls


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
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = from_json(arguments or "{}")
        except ValueError as error:
            raise BadCall(f"tool_calls: arguments are no JSON: {error}: {arguments:.80}") from None
    return {"id": call.get("id"), "type": "function", "function": function}


def parsed(raw: str, turn: int) -> AssistantMessage:
    """Parses the tool calls in the text. If one cannot be parsed, all of it stays plain text."""
    calls: list[ToolCall] = []
    for number, written in enumerate(written_calls(raw)):
        call = tool_call(written, f"call_{turn}_{number}")
        if call is None:
            return AssistantMessage(content=raw)
        calls.append(call)
    if not calls:
        return AssistantMessage(content=raw)
    return AssistantMessage(content=raw[: raw.index("<tool_call>")].strip(), tool_calls=tuple(calls))


def written_calls(raw: str) -> list[str]:
    """The JSON texts between the tags."""
    ends = [(found.start() + 1, found.end()) for found in END.finditer(raw)]
    texts: list[str] = []
    number = position = 0
    for begin in BEGIN.finditer(raw):
        if begin.start() < position:
            continue
        while number < len(ends) and ends[number][0] <= begin.end():
            number += 1
        if number == len(ends):
            break
        texts.append(raw[begin.end() : ends[number][0]])
        position = ends[number][1]
    return texts


def tool_call(text: str, call_id: str) -> ToolCall | None:
    """None for a text that is no call, or whose arguments JSON cannot hold: no finite numbers, half of a character."""
    try:
        # Unlike `json`, it refuses deep nesting, with which other code would fail.
        call = from_json(text)
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{written}".encode()
    except ValueError:
        return None
    return ToolCall(call_id, name, written)
