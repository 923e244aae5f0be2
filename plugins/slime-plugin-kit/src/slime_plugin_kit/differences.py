"""Gradients by central differences, with what a part stops the gradient through held where it was.

A surrogate loss such as -sg(w) A l has, on purpose, another gradient than its value. So what `detach` and `no_grad` gave
at the point in question is recorded, and given again at the points beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TENSOR: Any = Tensor
STOPS: Final = frozenset(
    {_TENSOR.detach, torch.detach, _TENSOR.data.__get__, _TENSOR.item, _TENSOR.tolist, _TENSOR.__float__}
)


class StoppedGradients(TorchFunctionMode):
    """Under `recording` it notes, in order, what carries no gradient though it was made from what does; under
    `replaying` it gives that again."""

    def __init__(self) -> None:
        super().__init__()
        self._notes: list[Any] = []
        self._next: int | None = None
        self._without_gradient = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._notes, self._next = [], None
        with self:
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        self._next = 0
        with self:
            yield
        assert self._next == len(self._notes), "it takes another way through its code when an input moves by 1e-5"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            # Only what the code itself switches off: an autograd.Function's forward runs without gradient too.
            self._without_gradient = not args[0]
            return result
        if not (func in STOPS or self._without_gradient) or not _any_gradient(args, kwargs):
            return result
        if self._next is None:
            self._notes.append(_copy(result))
            return result
        noted = self._notes[self._next]
        self._next += 1
        return _copy(noted)


def _any_gradient(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in (*args, *(kwargs or {}).values()))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def gradient_by_differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-5) -> Tensor:
    """d function / d at, of a function from (M,) float64 to a number, with stopped gradients held."""
    stopped = StoppedGradients()
    with stopped.recording():
        function(at.clone().requires_grad_())
    gradient = torch.zeros_like(at)
    for row in range(len(at)):
        values = []
        for move in (step, -step):
            moved = at.clone()
            moved[row] += move
            moved.requires_grad_()
            with stopped.replaying():
                value = function(moved)
            values.append(float(value.detach()))
        gradient[row] = (values[0] - values[1]) / (2 * step)
    return gradient
