"""render_chat: chat messages to text with the tokenizer's template, a program that comes with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, TemplateRuntimeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_COUNT: Final = 100_000
"""Numbers in all ranges of one rendering. Jinja's sandbox has this limit for a single range, so nested loops have none."""

TEMPLATE_ERRORS: Final = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)
"""What a template raises: its expressions are Python's."""


class CountedRange:
    """`range` for one rendering."""

    def __init__(self) -> None:
        self._left = MAX_COUNT

    def __call__(self, *ends: int) -> range:
        numbers = range(*ends)
        self._left -= 1 + len(numbers)
        if self._left < 0:
            raise TemplateRuntimeError(f"its loops over range() count more than {MAX_COUNT:,} numbers")
        return numbers


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of the messages. Raises one of TEMPLATE_ERRORS if the template fails."""
    given = variables(str(tokenizer.chat_template), template_kwargs or {})
    return str(
        tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **given
        )
    )


def variables(template: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of one rendering: those given, and a `range` with a limit."""
    return {**given, "range": CountedRange()} if "range" in template else dict(given)


def shown(error: Exception) -> str:
    """The template's error in a line, with the kind of a Python error."""
    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
