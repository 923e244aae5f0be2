"""Finds unequal expressions by their values at one point, before math-verify tries to prove them equal."""

from __future__ import annotations

from typing import Any

from sympy import Eq, Expr, Rational

# Larger than math-verify's tolerance: it rounds decimals to 6 places and compares constants to 15 digits.
_ABSOLUTE = Rational(1, 10**4)
_RELATIVE = Rational(1, 10**9)
_DIGITS = 30


def are_apart(one: Any, other: Any) -> bool:
    """True only if both are expressions whose values differ at a point; False if they agree, or if that is unknown. If only
    one is an equation, its right side is compared.

    Proofs can take long: sympy's simplify takes minutes or more for log(7) - 7^100.
    """
    if isinstance(one, Eq) != isinstance(other, Eq):
        one, other = (side.rhs if isinstance(side, Eq) else side for side in (one, other))
    if not (isinstance(one, Expr) and isinstance(other, Expr)) or one.is_Symbol or other.is_Symbol:
        return False
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if any(symbol.is_integer for symbol in symbols):
        return False
    # Positive, and no special values: roots and logarithms are defined, and nothing cancels by chance.
    point = {symbol: Rational(1271 + 309 * at, 1000) for at, symbol in enumerate(symbols)}
    try:
        value, other_value = one.evalf(_DIGITS, subs=point), other.evalf(_DIGITS, subs=point)
        if _is_finite_number(value) != _is_finite_number(other_value):
            return bool(value.is_infinite or other_value.is_infinite)
        if not _is_finite_number(value):
            return False
        scale = max(abs(value), abs(other_value))
        return bool(abs(value - other_value) > _ABSOLUTE + _RELATIVE * scale)
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError):
        # sympy's evalf raises various exceptions for what it cannot evaluate.
        return False


def _is_finite_number(value: Any) -> bool:
    # Complex values are sums of floats; what evalf could not do is still a function.
    return bool(value.is_number and value.is_finite) and all(
        part.is_Float or part.is_Integer for part in value.as_real_imag()
    )
