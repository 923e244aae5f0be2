"""AssistantTurns: which characters of a rendered conversation the assistant wrote. The chat template itself says so.

Where a template marks them with {% generation %}, its marks are taken. Any other is rendered up to each turn: what it adds
to the generation prompt is the turn, which is right only if both renderings are beginnings of the whole one. That is
checked for every turn, and a template that looks back and changes what it wrote before is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError

from slime_core.errors import DataError
from slime_core.types.prompt import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT: Final = "assistant"
UNTRAINED_KEY: Final = "step_loss_mask"
GENERATION_BLOCK: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text; `turns` are [start, end) in characters, in order: what is to be learnt."""

    text: str
    turns: tuple[tuple[int, int], ...]


class AssistantTurns:
    """Tool, user and system messages are never learnt, nor are headers that the generation prompt writes; what ends a
    turn is. A message with `step_loss_mask` 0 is left out, and with `last_turn_only` all but the last one are."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any], *, last_turn_only: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)
        self._last_turn_only = last_turn_only

    def render(self, messages: Sequence[Message], tools: Tools, origin: str) -> Rendered:
        """DataError names `origin` if there is no such turn, the template fails, or turns cannot be told apart."""
        spoken = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not spoken:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise DataError(
                f'{origin}: no message with role "{ASSISTANT}", so there is nothing to learn; there is {roles}. '
                "An answer in a column of its own is named with --label-key."
            )
        wanted = [
            position
            for position, number in enumerate(spoken)
            if messages[number].get(UNTRAINED_KEY, 1) and (not self._last_turn_only or position == len(spoken) - 1)
        ]
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
            if GENERATION_BLOCK.search(template):
                return self._marked(template, messages, tools, len(spoken), wanted, origin)
            return self._by_beginnings(messages, tools, [spoken[position] for position in wanted], origin)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"{origin}: the chat template failed: {error}") from error

    def _marked(
        self,
        template: str,
        messages: Sequence[Message],
        tools: Tools,
        num_spoken: int,
        wanted: Sequence[int],
        origin: str,
    ) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        # What `apply_chat_template` calls; its own token mask ends at the first mark that no token begins at.
        (text,), (marks,) = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **self._kwargs},
        )
        if len(wanted) == num_spoken and marks:
            return Rendered(text, tuple(marks))
        if len(marks) != num_spoken:
            raise DataError(
                f"{origin}: the chat template marks {len(marks)} turns with {{% generation %}}, and {num_spoken} messages "
                f'have the role "{ASSISTANT}": which of them are to be learnt cannot be told.'
            )
        return Rendered(text, tuple(marks[position] for position in wanted))

    def _by_beginnings(
        self, messages: Sequence[Message], tools: Tools, numbers: Sequence[int], origin: str
    ) -> Rendered:
        whole = self._text(messages, tools, prompt=False)
        turns = []
        for number in numbers:
            before = self._text(messages[:number], tools, prompt=True)
            through = self._text(messages[: number + 1], tools, prompt=False)
            if not (through.startswith(before) and whole.startswith(through)):
                raise DataError(
                    f"{origin}: the chat template writes the beginning of the conversation, up to message {number}, in "
                    "another way once the rest follows, so that this turn's tokens cannot be told. Put {% generation %} "
                    "and {% endgeneration %} around what the assistant writes in the model's chat template, or learn the "
                    "last turn alone: --rollout.collector sft --collector.loss-mask-type last_assistant."
                )
            turns.append((len(before), len(through)))
        return Rendered(whole, tuple(turns))

    def _text(self, messages: Sequence[Message], tools: Tools, *, prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self._kwargs
        )
        assert isinstance(text, str)
        return text
