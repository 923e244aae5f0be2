"""Sources: which elements of a model's parameters its loaders write, and from which of the sent tensors.

Imports torch alone.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WRITES: Final = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)
"""How loaders write: weights, and zeros where a vocabulary is padded."""


class Sources(TorchDispatchMode):
    """Notes which elements of parameters were written, from which sent tensor. vLLM calls each loader with a parameter without
    memory first: it counts the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = ""
        """Name of the tensor that loaders are given now."""
        self._marks: dict[int, Tensor] = {}
        """By storage: for each element 0, or the number of its name in `_names`."""
        self._names: dict[int, list[str]] = {}
        self._kept: dict[int, Tensor] = {}
        """The parameters: the address of a storage that is freed may become another's."""

    def watch(self, parameter: Tensor) -> None:
        """A parameter as a checkpoint has it, contiguous or with the strides of a dense matrix."""
        key = parameter.untyped_storage()._cdata
        self._kept[key], self._names[key] = parameter, []

    def forget(self, parameter: Tensor) -> None:
        for table in (self._marks, self._names, self._kept):
            table.pop(parameter.untyped_storage()._cdata, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WRITES:
            self._note(args[0])
        return func(*args, **(kwargs or {}))

    def _note(self, written: Tensor) -> None:
        key = written.untyped_storage()._cdata
        if key not in self._kept:
            return
        if key not in self._marks:
            # On the host: memory of the device is short.
            self._marks[key] = torch.zeros(self._kept[key].numel(), dtype=torch.int16, device="cpu")
        names = self._names[key]
        if not names or names[-1] != self.sent:
            names.append(self.sent)
        place = self._marks[key].as_strided(written.shape, written.stride(), written.storage_offset())
        # Loaders are called again with the real memory, when other tensors have come.
        place[place == 0] = len(names)

    def num_written(self, parameter: Tensor) -> int:
        marks = self._marks.get(parameter.untyped_storage()._cdata)
        return 0 if marks is None else int(marks.count_nonzero())

    def names(self, parameter: Tensor) -> list[str]:
        """The tensors that were written to it."""
        return self._names.get(parameter.untyped_storage()._cdata, [])

    def name_at(self, parameter: Tensor, index: tuple[int, ...]) -> str | None:
        """The tensor that this element is from."""
        key = parameter.untyped_storage()._cdata
        marks = self._marks.get(key)
        if marks is None or len(index) != parameter.dim():
            return None
        place = sum(number * stride for number, stride in zip(index, parameter.stride(), strict=True))
        number = int(marks[place]) if place < len(marks) else 0
        return self._names[key][number - 1] if number else None
