"""HeldLayer: a layer as it serves, set aside while its weights are loaded once more in its place.

Imports torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

PRODUCT: Final = "cpu_linear"
"""Attribute of a layer whose weight vLLM has packed for a CPU: `layer.cpu_linear(x, weight, bias)`."""
INPUTS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    parameter: str
    index: tuple[int, ...] | None
    """Of the first element that differs; None: it has another shape or dtype."""
    held: str
    sent: str
    packed: bool = False
    """It is a weight that only the layer's product shows."""


class HeldLayer:
    """Make it before the layer is prepared for loading, and call `restore` in the end."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name, self.layer = name, layer
        self.parameters = {key: value for key, value in layer._parameters.items() if value is not None}
        self._state = dict(layer.__dict__) | {
            "_parameters": dict(layer._parameters),
            "_buffers": dict(layer._buffers),
            "_non_persistent_buffers_set": set(layer._non_persistent_buffers_set),
        }
        # vLLM wraps the loaders of parameters that it leaves where they are.
        self._attributes = {key: dict(value.__dict__) for key, value in self.parameters.items()}

    def restore(self) -> None:
        for key, value in self.parameters.items():
            value.__dict__.clear()
            value.__dict__.update(self._attributes[key])
        self.layer.__dict__.clear()
        self.layer.__dict__.update(self._state)

    @property
    def product(self) -> Any:
        """None: nothing is packed."""
        product = self._state.get(PRODUCT)
        return None if product is torch.nn.functional.linear else product

    def differences(self, shapes: Mapping[str, torch.Size]) -> Iterator[Difference]:
        """At most one of each parameter, between the layer as it was and as it is now. shapes: those of a checkpoint."""
        found = set()
        for key, held in self.parameters.items():
            sent = self.layer._parameters.get(key)
            if sent is None or sent.shape != held.shape or sent.dtype != held.dtype:
                yield Difference(parameter=key, index=None, held=form(held), sent=form(sent))
            elif (place := unequal(held.data, sent.data)) is not None:
                yield Difference(parameter=key, index=place, held=value_at(held, place), sent=value_at(sent, place))
            else:
                continue
            found.add(key)
        if self.product is not None and "weight" not in found and len(shape := shapes.get("weight", torch.Size())) == 2:
            yield from self._difference_of_product(shape[1])

    def _difference_of_product(self, num_inputs: int) -> Iterator[Difference]:
        """The product with unit vectors is the packed weight, exactly: all other terms are zero."""
        held_weight, weight = self.parameters["weight"], self.layer._parameters["weight"]
        assert weight is not None
        for start in range(0, num_inputs, INPUTS):
            length = min(INPUTS, num_inputs - start)
            units = torch.zeros(length, num_inputs, dtype=held_weight.dtype)
            units[:, start : start + length].fill_diagonal_(1)
            held = self.product(units, held_weight, None)
            sent = getattr(self.layer, PRODUCT)(units, weight, None)
            differ = (held != sent) & ~(held.isnan() & sent.isnan())
            if differ.any():
                column, row = differ.nonzero()[0].tolist()
                yield Difference(
                    parameter="weight",
                    index=(row, start + column),
                    held=value_at(held, (column, row)),
                    sent=value_at(sent, (column, row)),
                    packed=True,
                )
                return


def value_at(tensor: Tensor, place: tuple[int, ...]) -> str:
    return str(tensor[place].item())


def form(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def unequal(first: Tensor, second: Tensor) -> tuple[int, ...] | None:
    """The index of the first element whose bits differ, of two tensors of one shape and dtype."""
    bits = [
        tensor.contiguous().view(-1, 1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
        for tensor in (first, second)
    ]
    if torch.equal(*bits):
        return None
    flat = int((bits[0] != bits[1]).any(-1).nonzero()[0])
    return tuple(int(place) for place in torch.unravel_index(torch.tensor(flat), first.shape))
