"""Bounds on how large a sympy expression gets once it is computed: 9^{9^{9}} is short to write only."""

from __future__ import annotations

from typing import Any

import sympy
from sympy import Float, Integer, Pow, Rational, factorial

MAX_BITS = 2**15
"""Limit on the bits of any intermediate number; about 10 000 decimal digits."""
MAX_NODES = 500
MAX_SYMBOLIC_POWER_BITS = 7
"""Powers of sums and the like are multiplied out: up to the 127th."""
_TOO_MANY = 2**62

# Left unevaluated an answer is not final, and evaluating it is open-ended.
_OPEN_ENDED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)


def is_affordable(expression: Any) -> bool:
    """Whether computing an unevaluated expression stays small. Looks at it without computing anything."""
    nodes = sum(1 for _ in sympy.preorder_traversal(expression))
    return nodes <= MAX_NODES and bits(expression) <= MAX_BITS


def bits(expression: Any) -> int:
    """An upper bound on the length in bits of any number that computing `expression` meets."""
    match expression:
        case Rational():
            # Integers are rationals too.
            return max(int(expression.p).bit_length(), int(expression.q).bit_length(), 1)
        case Float():
            return 64
        case _ if isinstance(expression, _OPEN_ENDED):
            return _TOO_MANY
        case Pow():
            return _power_bits(expression.base, expression.exp)
        case factorial():
            argument = bits(expression.args[0])
            return argument * 2**argument if argument <= 11 else _TOO_MANY
        case _:
            parts = _parts(expression)
            return min(_TOO_MANY, 1 + sum(bits(part) for part in parts))


def _power_bits(base: Any, exponent: Any) -> int:
    exponent_bits = bits(exponent)
    limit = MAX_SYMBOLIC_POWER_BITS if base.free_symbols and not base.is_Symbol else MAX_BITS.bit_length()
    if exponent_bits > limit:
        return _TOO_MANY
    if isinstance(exponent, Rational) and not isinstance(exponent, Integer):
        # A root keeps the size of what is under it.
        exponent_bits = int(exponent.p).bit_length()
    return min(_TOO_MANY, bits(base) << exponent_bits)


def _parts(expression: Any) -> list[Any]:
    if isinstance(expression, sympy.MatrixBase):
        return list(expression.flat())
    return list(getattr(expression, "args", ()))
