"""CountedProduct: limits the products in a chat template. Jinja's sandbox has no such limit, and computes products of constants
when it compiles the template."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from jinja2 import Environment, TemplateRuntimeError

PRODUCT: Final = "counted_product"
"""The variable of a rendering that is a CountedProduct."""
MAX_ITEMS: Final = 1_000_000
"""Characters and items in all multiplied sequences of one rendering."""
MAX_BITS: Final = 4096
"""Of an integer."""


class CountedProduct:
    """A factor between the two of each product in one rendering: `'-' * counted_product * 9` is `'-' * 9`."""

    def __init__(self, left: Any = None, made: list[int] | None = None) -> None:
        self._left = left
        self._made = [0] if made is None else made
        """Items of all products so far, of all parts of the rendering."""

    def __rmul__(self, left: Any) -> CountedProduct:
        return CountedProduct(left, self._made)

    __rpow__ = __rmul__

    def __neg__(self) -> CountedProduct:
        # Jinja compiles `-2 ** x` without parentheses.
        return CountedProduct(-self._left, self._made)

    def __mul__(self, right: Any) -> Any:
        for sequence, count in ((self._left, right), (right, self._left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                self._made[0] += len(sequence) * max(count, 0)
        if self._made[0] > MAX_ITEMS:
            raise TemplateRuntimeError(f"its products make more than {MAX_ITEMS:,} characters or items")
        if isinstance(self._left, int) and isinstance(right, int):
            check_bits(self._left.bit_length() + right.bit_length())
        return self._left * right

    def __pow__(self, right: Any) -> Any:
        if isinstance(self._left, int) and isinstance(right, int):
            check_bits(self._left.bit_length() * right)
        return self._left**right


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateRuntimeError(f"its products make an integer of more than {MAX_BITS:,} bits")


@lru_cache
def with_counted_products(template: str) -> str:
    """The template with the variable `counted_product` in each product and power; TemplateSyntaxError if it is none."""
    if "*" not in template:
        return template
    text, before = "", ""
    for _, kind, token in Environment(keep_trailing_newline=True).lex(template):
        # After ( and , it unpacks arguments.
        binary = kind == "operator" and token in ("*", "**") and before not in ("(", ",")
        text += f"{token} {PRODUCT} {token}" if binary else token
        if kind != "whitespace":
            before = token
    return text
