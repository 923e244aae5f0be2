"""Weight: converts tensors of a Hugging Face folder to one parameter of Megatron, and back.

Legend: a "whole" tensor is a parameter of Megatron before it is cut over tensor-parallel ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One of the tensors that a tensor of the folder stacks along its first axis."""

    index: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Weight(ABC):
    names: tuple[str, ...]
    """Names in the folder."""
    slot: Slot | None = None
    """Where this weight is in the folder's tensors; None: it is all of them."""

    @abstractmethod
    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Joins the folder's tensors (this weight's slot of them), in the order of `names`, to the whole tensor."""

    @abstractmethod
    def part(self, whole: Tensor) -> list[Tensor]:
        """The inverse of `join`."""

    def shapes(self, whole: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Shapes of the folder's tensors, by their names. `whole`: the whole tensor's."""
        parts = self.part(torch.empty(tuple(whole), device="meta"))
        stacked = () if self.slot is None else (self.slot.count,)
        return {name: (*stacked, *part.shape) for name, part in zip(self.names, parts, strict=True)}

    def shard(self, whole: Tensor, dim: int, count: int) -> list[Tensor]:
        """The part of each of `count` tensor-parallel ranks."""
        return list(whole.chunk(count, dim))

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        return torch.cat(list(shards), dim)


class Stacks:
    """Joins the slots of the folder's tensors, which may come in any order."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[int, Tensor]] = {}

    def add(self, weight: Weight, whole: Tensor) -> dict[str, Tensor]:
        """Returns the folder's tensors that are complete with this whole tensor, by their names."""
        parts = dict(zip(weight.names, weight.part(whole), strict=True))
        if weight.slot is None:
            return parts
        found = {}
        for name, part in parts.items():
            slots = self._slots.setdefault(name, {})
            slots[weight.slot.index] = part
            if len(slots) == weight.slot.count:
                found[name] = torch.stack([slots[index] for index in range(weight.slot.count)])
                del self._slots[name]
        return found


@dataclass(frozen=True, kw_only=True)
class Plain(Weight):
    """One tensor, unchanged."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole]


@dataclass(frozen=True, kw_only=True)
class Swapped(Weight):
    """The two halves of the columns are swapped."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(tensors[0].chunk(2, dim=1)[::-1], dim=1)

    def part(self, whole: Tensor) -> list[Tensor]:
        return [self.join([whole])]


@dataclass(frozen=True, kw_only=True)
class Qkv(Weight):
    """Query, key and value, by group: the group's queries, its key, its value."""

    groups: int
    queries_per_group: int
    head_dim: int

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        q, k, v = (tensor.unflatten(0, (self.groups, -1, self.head_dim)) for tensor in tensors)
        return torch.cat([q, k, v], dim=1).flatten(0, 2)

    def part(self, whole: Tensor) -> list[Tensor]:
        grouped = whole.unflatten(0, (self.groups, self.queries_per_group + 2, self.head_dim))
        parts = grouped.split([self.queries_per_group, 1, 1], dim=1)
        return [part.flatten(0, 2).contiguous() for part in parts]


@dataclass(frozen=True, kw_only=True)
class GateUp(Weight):
    """Gate above up; each rank has its part of both. The folder has two tensors, or one with both."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), 0)

    def part(self, whole: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in whole.chunk(len(self.names), 0)]

    def shard(self, whole: Tensor, dim: int, count: int) -> list[Tensor]:
        gate, up = whole.chunk(2, 0)
        return [torch.cat(pair, 0) for pair in zip(gate.chunk(count, 0), up.chunk(count, 0), strict=True)]

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        pairs = [shard.chunk(2, 0) for shard in shards]
        return torch.cat([gate for gate, _ in pairs] + [up for _, up in pairs], 0)


@dataclass(frozen=True, kw_only=True)
class GatedQkv(Qkv):
    """`Qkv` with gates of the output behind the group's queries. The folder has each head's query and gate together."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        both = tensors[0].unflatten(0, (self.groups, self.queries_per_group, 2, self.head_dim))
        k, v = (tensor.unflatten(0, (self.groups, 1, self.head_dim)) for tensor in tensors[1:])
        return torch.cat([both[:, :, 0], both[:, :, 1], k, v], dim=1).flatten(0, 2)

    def part(self, whole: Tensor) -> list[Tensor]:
        per_group = self.queries_per_group
        grouped = whole.unflatten(0, (self.groups, 2 * per_group + 2, self.head_dim))
        q, gate, k, v = grouped.split([per_group, per_group, 1, 1], dim=1)
        return [
            torch.stack([q, gate], dim=2).flatten(0, 3).contiguous(),
            *(x.flatten(0, 2).contiguous() for x in (k, v)),
        ]


@dataclass(frozen=True, kw_only=True)
class ByHead(Weight):
    """All rows of a head are contiguous, so that ranks share heads."""

    heads: int
    sections: tuple[tuple[int, ...], ...]
    """For each tensor of the folder: rows per head of each of its parts. A part holds the rows of all heads, then the next
    follows."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [
            part.unflatten(0, (self.heads, rows))
            for tensor, sizes in zip(tensors, self.sections, strict=True)
            for part, rows in zip(tensor.split([self.heads * rows for rows in sizes]), sizes, strict=True)
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def part(self, whole: Tensor) -> list[Tensor]:
        sizes = [rows for of_tensor in self.sections for rows in of_tensor]
        parts = iter(whole.unflatten(0, (self.heads, sum(sizes))).split(sizes, dim=1))
        return [torch.cat([next(parts).flatten(0, 1) for _ in of_tensor]) for of_tensor in self.sections]
