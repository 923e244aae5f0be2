"""Reduced: what upstream's `sum_of_sample_mean` returns, still token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor


class Reduced:
    """A sum over samples and tokens of which each token's part is known, so that the run can weigh it. It can be added and
    scaled, as a loss is from its terms, and detached; TypeError or AttributeError for anything else."""

    def __init__(self, tokens: Tensor) -> None:
        """tokens: (T,)"""
        self.tokens = tokens

    def __add__(self, other: Any) -> Reduced:
        if isinstance(other, Reduced):
            return Reduced(self.tokens + other.tokens)
        return Reduced(self.tokens + zero(other))

    def __mul__(self, other: Any) -> Reduced:
        return Reduced(self.tokens * factor(other))

    def __truediv__(self, other: Any) -> Reduced:
        return Reduced(self.tokens / factor(other))

    def __neg__(self) -> Reduced:
        return Reduced(-self.tokens)

    def __sub__(self, other: Any) -> Reduced:
        return self.__add__(-other)

    def __rsub__(self, other: Any) -> Reduced:
        return (-self).__add__(other)

    __radd__ = __add__
    __rmul__ = __mul__

    def clone(self) -> Reduced:
        return self

    def float(self) -> Reduced:
        return self

    def detach(self) -> Reduced:
        return Reduced(self.tokens.detach())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(refused(name), name=name, obj=self)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Reduced:
        """Of a tensor and this."""
        name = getattr(function, "__name__", "").strip("_")
        operation = OPERATIONS.get(name)
        if operation is None or len(args) != 2 or options:
            raise TypeError(refused(name))
        return operation(*args)


OPERATIONS: Final[Mapping[str, Callable[[Any, Any], Reduced]]] = {
    "add": lambda one, other: one + other if isinstance(one, Reduced) else other + one,
    "mul": lambda one, other: one * other if isinstance(one, Reduced) else other * one,
    "sub": lambda one, other: one - other if isinstance(one, Reduced) else -other + one,
}
"""torch's names of what a tensor on the left calls."""


def zero(value: Any) -> Any:
    """What may be added without tokens: 0, also with a graph."""
    if isinstance(value, int | float | Tensor) and float(torch.as_tensor(value).detach().sum()) == 0:
        return 0.0
    raise TypeError(refused("the sum with a number that is no reduction"))


def factor(value: Any) -> Any:
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return value
    raise TypeError(refused(f"the product with {type(value).__name__}"))


def refused(what: str) -> str:
    return (
        f"{what}: what sum_of_sample_mean returns can be added, and multiplied by a number, since the run weighs each token "
        "itself. Write a loss (slime.losses)"
    )
