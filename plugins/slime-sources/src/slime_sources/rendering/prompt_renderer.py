"""PromptRenderer: renders a raw row to a prompt: keys, chat template, tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slime_core.atomic_io.json_text import json_text
from slime_core.contracts.media import MediaRenderer
from slime_core.contracts.renderer import Renderer
from slime_core.errors import ConfigError, DataError, ModelError
from slime_core.registry.boundary import foreign
from slime_core.types.image import Image
from slime_core.types.prompt import Message, Prompt
from slime_sources.rendering.chat_template import TEMPLATE_ERRORS, render_chat, shown
from slime_sources.rendering.plain_encoding import encoded
from slime_sources.rendering.unknown_text import UnknownText

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

RESERVED_TEMPLATE_KWARGS: Final = frozenset(
    {"conversation", "tools", "tokenize", "add_generation_prompt", "return_dict", "return_tensors"}
)
"""Arguments of the template that the renderer sets itself."""
CHARACTERS_PER_TOKEN: Final = 8
LEAST_HEAD: Final = 50_000
"""A text is tokenized up to this many characters, and as many per token that a prompt may have, before the rest is: a row of
hundreds of megabytes would take minutes."""
MOST_NOTED: Final = 1000
WHOLE_ROW: Final = "*"
"""The metadata key of all columns."""


@dataclass(frozen=True, eq=False)
class PromptRenderer(Renderer):
    """Without the chat template the row's string is the prompt, and no special tokens are added. With it, a string is one
    user message, and the template gets the row's tools and ends with the generation prompt.

    The input key and, if set, the label key must be in every row; metadata and tools are optional. Tools are a list
    or its JSON text, and are kept in the prompt's metadata too.

    `media` inserts images and videos into messages, text and tokens. `token_ids` of a prompt that `accepts` refuses may be only
    its beginning.
    """

    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    media: MediaRenderer | None = None
    media_keys: frozenset[str] = frozenset()
    """Columns of media, which are no metadata."""
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] | None = None
    max_prompt_len: int | None = None
    context_len: int | None = None
    """Tokens that the model reads; a prompt leaves one of them for the response."""
    max_unknown_share: float = 0.0
    too_long: dict[str, str] = field(default_factory=dict, init=False)
    """The first rows that the model cannot read, by origin."""
    unknown: dict[str, str] = field(default_factory=dict, init=False)
    """The first rows with unknown text, by origin."""

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
        if self._fits(len(token_ids)):
            self._check_unknown(text, token_ids, origin)
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
        length = len(prompt.token_ids)
        if self._fits(length):
            return True
        if self._most != self.max_prompt_len:
            more = " or more" if len(prompt.text) > self._head else ""
            note(self.too_long, prompt.origin, f"{length:,} tokens{more}")
        return False

    @property
    def limit(self) -> str:
        if self._most == self.max_prompt_len:
            return f"rollout_max_prompt_len is {self.max_prompt_len}"
        return f"the model reads {self.context_len} tokens, one of which is left for the response"

    def notices(self) -> list[str]:
        """Sentences on rows that are left out, or changed by the tokenizer, which name the first."""
        found = []
        if self.too_long:
            found.append(f"{listed(self.too_long)}: left out, because {self.limit} (rollout/data/num_too_long)")
        if self.unknown:
            found.append(f"{listed(self.unknown)}: the model does not see this text (max_unknown_share)")
        return found

    @cached_property
    def _most(self) -> int | None:
        """Tokens that a prompt may have."""
        return min(
            (limit for limit in (self.max_prompt_len, self.context_len and self.context_len - 1) if limit is not None),
            default=None,
        )

    @property
    def _head(self) -> int:
        """Characters that are tokenized first."""
        return max(LEAST_HEAD, CHARACTERS_PER_TOKEN * (self._most or 0))

    def _fits(self, length: int) -> bool:
        return self._most is None or length <= self._most

    def _required(self, row: Mapping[str, Any], key: str, option: str, origin: str) -> Any:
        if key not in row:
            raise DataError(
                f'{origin}: no key "{key}" ({option}); the row has: {", ".join(row) or "no keys"}. '
                f"Set it with --{option.replace('_', '-')}."
            )
        return row[key]

    def _optional_object(self, row: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
        if self.metadata_key == WHOLE_ROW:
            return {key: value for key, value in row.items() if key != self.input_key and key not in self.media_keys}
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
        try:
            return render_chat(self.tokenizer, messages, tools=tools, template_kwargs=self.apply_chat_template_kwargs)
        except TEMPLATE_ERRORS as error:
            name = self.tokenizer.name_or_path or "the model"
            raise DataError(f"{origin}: the chat template of {name} failed: {shown(error)}") from error

    def _token_ids(self, text: str, origin: str) -> npt.NDArray[np.int32]:
        """The tokens; of a text that is too long, those of a beginning that is."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{origin}: the prompt is not valid Unicode: {error}") from error
        length = len(text) if self._most is None else self._head
        while True:
            token_ids = encoded(self.tokenizer, text[:length])
            # The cut changes a few tokens before it.
            if length >= len(text) or (self._most is not None and len(token_ids) > 1.125 * self._most + 16):
                break
            length *= 2
        if not len(token_ids):
            raise DataError(f"{origin}: the prompt has no tokens: {_shown(text)}")
        return token_ids

    @cached_property
    def _unknown_text(self) -> UnknownText:
        return UnknownText(self.tokenizer)

    def _check_unknown(self, text: str, token_ids: npt.NDArray[np.int32], origin: str) -> None:
        what = self._unknown_text.refuse(text, token_ids, origin, self.max_unknown_share)
        if what is not None:
            note(self.unknown, origin, what)


def note(rows: dict[str, str], origin: str, what: str) -> None:
    if len(rows) < MOST_NOTED:
        rows[origin] = what


def listed(rows: Mapping[str, str], count: int = 3) -> str:
    """How many rows, and the first.

    >>> listed({"train.jsonl, line 2": "80 tokens"})
    '1 row (train.jsonl, line 2: 80 tokens)'
    """
    number = f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}{' or more' if len(rows) == MOST_NOTED else ''}"
    first = [f"{origin}: {what}" for origin, what in list(rows.items())[:count]]
    return f"{number} ({'; '.join(first)}{'; ...' if len(rows) > count else ''})"


def _shown(value: Any, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "…"
