"""AssistantTurns: finds the assistant's turns in a rendered conversation, by the chat template.

If the template marks them with {% generation %}, its marks are used. Otherwise it is rendered up to each turn: what the turn
adds to the generation prompt is trained. This requires that both renderings are prefixes of the whole one, which is checked
for every turn; a template that changes earlier text when later messages follow is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from slime_core.errors import DataError
from slime_core.types.prompt import Message
from slime_sources.rendering.chat_template import TEMPLATE_ERRORS, render_chat, shown, variables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT: Final = "assistant"
UNTRAINED_KEY: Final = "step_loss_mask"
GENERATION_BLOCK: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. `turns`: [start, end) in characters of the text to train on, in order."""

    text: str
    turns: tuple[tuple[int, int], ...]


class AssistantTurns:
    """Tool, user and system messages are never trained, nor are headers of the generation prompt; the end of a turn is trained.
    Not trained are also messages with `step_loss_mask` 0, and with `last_turn_only` all turns but the last."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any], *, last_turn_only: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)
        self._last_turn_only = last_turn_only

    def render(self, messages: Sequence[Message], tools: Tools, origin: str) -> Rendered:
        """DataError, with `origin`, if there is no such turn, the template fails, or the turns cannot be located."""
        spoken = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not spoken:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise DataError(
                f'{origin}: no message with role "{ASSISTANT}", so there is nothing to train on; there is {roles}. '
                "If the response is in another column, pass --label-key."
            )
        selected = [
            position
            for position, number in enumerate(spoken)
            if messages[number].get(UNTRAINED_KEY, 1) and (not self._last_turn_only or position == len(spoken) - 1)
        ]
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
            if GENERATION_BLOCK.search(template):
                return self._marked(template, messages, tools, len(spoken), selected, origin)
            return self._by_beginnings(messages, tools, [spoken[position] for position in selected], origin)
        except TEMPLATE_ERRORS as error:
            raise DataError(f"{origin}: the chat template failed: {shown(error)}") from error

    def _marked(
        self,
        template: str,
        messages: Sequence[Message],
        tools: Tools,
        num_spoken: int,
        selected: Sequence[int],
        origin: str,
    ) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        # Calls what `apply_chat_template` calls, whose token mask ends at the first mark where no token begins.
        (text,), (marks,) = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **variables(template, self._kwargs)},
        )
        if len(selected) == num_spoken and marks:
            return Rendered(text, tuple(marks))
        if len(marks) != num_spoken:
            raise DataError(
                f"{origin}: the chat template marks {len(marks)} turns with {{% generation %}}, and {num_spoken} messages "
                f'have the role "{ASSISTANT}": the marks cannot be assigned to messages.'
            )
        return Rendered(text, tuple(marks[position] for position in selected))

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
                    f"{origin}: the chat template renders the conversation up to message {number} differently when later "
                    "messages follow, so the tokens of this turn cannot be located. Put {% generation %} and "
                    "{% endgeneration %} around the assistant's text in the model's chat template, or train only the last "
                    "turn: --rollout.collector sft --collector.loss-mask-type last_assistant."
                )
            turns.append((len(before), len(through)))
        return Rendered(whole, tuple(turns))

    def _text(self, messages: Sequence[Message], tools: Tools, *, prompt: bool) -> str:
        return render_chat(
            self._tokenizer, messages, tools=tools, add_generation_prompt=prompt, template_kwargs=self._kwargs
        )
