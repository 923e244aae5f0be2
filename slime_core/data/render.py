"""PromptRenderer: renders a raw row to a prompt: keys, chat template, tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from slime_core.atomic_io.json_text import json_text
from slime_core.contracts.media import MediaRenderer
from slime_core.errors import ConfigError, DataError, ModelError
from slime_core.registry.boundary import foreign
from slime_core.types.image import Image
from slime_core.types.prompt import Message, Prompt

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

RESERVED_TEMPLATE_KWARGS: Final = frozenset(
    {"conversation", "tools", "tokenize", "add_generation_prompt", "return_dict", "return_tensors"}
)
"""Arguments of the template that the renderer sets itself."""


@dataclass(frozen=True, eq=False)
class PromptRenderer:
    """Without the chat template the row's string is the prompt, and no special tokens are added. With it, a string is one
    user message, and the template gets the row's tools and ends with the generation prompt.

    The input key and, if set, the label key must be in every row; metadata and tools are optional. Tools are a list
    or its JSON text, and are kept in the prompt's metadata too.

    `media` inserts images and videos into messages, text and tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    media: MediaRenderer | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] | None = None
    max_prompt_len: int | None = None

    def __post_init__(self) -> None:
        if reserved := sorted(RESERVED_TEMPLATE_KWARGS & (self.apply_chat_template_kwargs or {}).keys()):
            raise ConfigError(f"apply_chat_template_kwargs: {', '.join(reserved)} cannot be set; slime sets it")
        if self.apply_chat_template and not self.tokenizer.chat_template:
            raise ModelError(
                f"apply_chat_template is on, but the tokenizer of {self.tokenizer.name_or_path or 'this model'} has no chat "
                "template. Add chat_template.jinja to the model's folder, or omit --apply-chat-template and provide "
                "whole prompts as strings."
            )

    def render(self, row: Mapping[str, Any], *, group_index: int, origin: str, folder: Path | None = None) -> Prompt:
        """See `Renderer.render`; also raises DataError if a value has the wrong type."""
        value = self._required(row, self.input_key, "input_key", origin)
        label = None if self.label_key is None else self._required(row, self.label_key, "label_key", origin)
        metadata = dict(self._optional_object(row, origin))
        tools = self._tools(row, origin)
        if tools is not None:
            metadata["tools"] = tools
        json_text(label, f"{origin}: the label")
        json_text(metadata, f"{origin}: the metadata")
        messages = None
        images: tuple[Image, ...] = ()
        if self.media is not None:
            with foreign(self.media, f"read of {origin}"):
                images = self.media.read(row, origin, folder)
        text = value
        if self.apply_chat_template:
            messages = self._messages(value, origin)
            if self.media is not None:
                with foreign(self.media, f"place of {origin}"):
                    messages = self.media.place(messages, images, origin)
            text = self._render_template(messages, tools, origin)
        elif isinstance(value, list):
            raise DataError(
                f'{origin}: "{self.input_key}" is a list of messages, which requires the chat template: pass '
                "--apply-chat-template."
            )
        elif not isinstance(value, str):
            raise self._wrong_input(value, origin)
        if self.media is not None:
            with foreign(self.media, f"mark of {origin}"):
                text = self.media.mark(text, images, origin)
        token_ids = self._token_ids(text, origin)
        if self.media is not None:
            with foreign(self.media, f"expand of {origin}"):
                token_ids, images = self.media.expand(token_ids, images, origin)
        return Prompt(
            group_index=group_index,
            text=text,
            token_ids=token_ids,
            label=label,
            messages=messages,
            tools=tools,
            metadata=metadata,
            images=images,
            origin=origin,
        )

    def accepts(self, prompt: Prompt) -> bool:
        return self.max_prompt_len is None or len(prompt.token_ids) <= self.max_prompt_len

    def _required(self, row: Mapping[str, Any], key: str, option: str, origin: str) -> Any:
        if key not in row:
            raise DataError(
                f'{origin}: no key "{key}" ({option}); the row has: {", ".join(row) or "no keys"}. '
                f"Set it with --{option.replace('_', '-')}."
            )
        return row[key]

    def _optional_object(self, row: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
        metadata = row.get(self.metadata_key)
        if metadata is None:
            return {}
        if not isinstance(metadata, dict):
            raise DataError(
                f'{origin}: "{self.metadata_key}" (metadata_key) must be an object, found {_shown(metadata)}'
            )
        return metadata

    def _tools(self, row: Mapping[str, Any], origin: str) -> list[dict[str, Any]] | None:
        tools = row.get(self.tool_key)
        if isinstance(tools, str) and tools:
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise DataError(f'{origin}: "{self.tool_key}" (tool_key) is not valid JSON: {error}') from error
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise DataError(f'{origin}: "{self.tool_key}" (tool_key) must be a list of objects, found {_shown(tools)}')
        return tools

    def _messages(self, value: Any, origin: str) -> Sequence[Message]:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise self._wrong_input(value, origin)
        for number, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise DataError(
                    f'{origin}: message {number} of "{self.input_key}" is not an object with a role, '
                    f"found {_shown(message)}"
                )
        json_text(value, f'{origin}: "{self.input_key}"')
        return value

    def _wrong_input(self, value: Any, origin: str) -> DataError:
        return DataError(
            f'{origin}: "{self.input_key}" (input_key) must be a string or a list of messages, found {_shown(value)}'
        )

    def _render_template(self, messages: Sequence[Message], tools: Sequence[Any] | None, origin: str) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **(self.apply_chat_template_kwargs or {}),
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"{origin}: the chat template failed: {error}") from error
        assert isinstance(text, str)
        return text

    def _token_ids(self, text: str, origin: str) -> npt.NDArray[np.int32]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{origin}: the prompt is not valid Unicode: {error}") from error
        token_ids = np.asarray(self.tokenizer.encode(text, add_special_tokens=False, verbose=False), np.int32)
        if not len(token_ids):
            raise DataError(f"{origin}: the prompt has no tokens: {_shown(text)}")
        return token_ids


def _shown(value: Any, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "…"
