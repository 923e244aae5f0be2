"""Flat: a frozen dataclass as a tuple. The driver reads several for each response, and pickle takes ten times as long for the
dataclass itself."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from slime_core.rollout.trace import GroupTrace, ResponseTrace, Turn
from slime_core.types.completion import Completion, GenerateRequest
from slime_core.types.sample import Sample

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class Flat(Generic[T]):
    def __init__(self, kind: type[T], *, without: frozenset[str] = frozenset()) -> None:
        self._kind: Any = kind
        names = [field.name for field in fields(kind)]
        self.names = tuple(name for name in names if name not in without)
        self._values = attrgetter(*self.names)

    def pack(self, thing: T) -> tuple[Any, ...]:
        values: tuple[Any, ...] = self._values(thing)
        return values

    def unpack(self, values: tuple[Any, ...], **others: Any) -> T:
        """`others`: fields that were left out."""
        thing: T = self._kind(**dict(zip(self.names, values, strict=True)), **others)
        return thing

    def replace(self, thing: T, changes: dict[str, Any]) -> T:
        changed: T = self._kind(**{**dict(zip(self.names, self._values(thing), strict=True)), **changes})
        return changed


REQUEST: Final = Flat(GenerateRequest, without=frozenset({"caller"}))
COMPLETION: Final = Flat(Completion)
SAMPLE: Final = Flat(Sample)
TURN: Final = Flat(Turn)
RESPONSE: Final = Flat(ResponseTrace, without=frozenset({"turns"}))
GROUP: Final = Flat(GroupTrace, without=frozenset({"responses"}))


def pack_trace(trace: GroupTrace) -> tuple[Any, ...]:
    responses = [(RESPONSE.pack(one), [TURN.pack(turn) for turn in one.turns]) for one in trace.responses]
    return GROUP.pack(trace), responses


def unpack_trace(packed: tuple[Any, ...]) -> GroupTrace:
    group, responses = packed
    return GROUP.unpack(
        group,
        responses=[RESPONSE.unpack(one, turns=tuple(TURN.unpack(turn) for turn in turns)) for one, turns in responses],
    )
