"""ForwardInput: what a layer takes from outside of Megatron's arguments, the same when its activations are recomputed."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import torch

Input = TypeVar("Input")


class ForwardInput(Generic[Input]):
    """Set before each forward of a layer, and taken once in each. In training, a forward without gradient is recomputed, with
    gradient, in its backward; backwards follow the order of their forwards."""

    def __init__(self) -> None:
        self._value: Input | None = None
        self._again: deque[Input] = deque()
        self._training = False

    def set(self, value: Input | None, *, training: bool) -> None:
        """Of the next forward. None: it takes nothing."""
        self._value, self._training = value, training

    def forget(self) -> None:
        self._value = None
        self._again.clear()

    @property
    def left(self) -> int:
        """Forwards that ran without gradient and were not recomputed."""
        return len(self._again)

    def take(self) -> Input | None:
        with_gradient = torch.is_grad_enabled()
        if with_gradient and self._again:
            return self._again.popleft()
        if self._value is not None and self._training and not with_gradient:
            self._again.append(self._value)
        return self._value
