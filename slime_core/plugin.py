"""Decorators that name the functions and classes of a plugin file (`--plugin ./my_reward.py`).

They only leave a mark on what they decorate; nothing is registered until a `Registry` is built with the file:

    from slime_core.plugin import reward

    @reward("short")
    def short(sample):
        return -float(sample.response_length)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

from slime_core import groups
from slime_core.contracts.example import Example
from slime_core.contracts.hookspecs import hookimpl
from slime_core.contracts.needs import Need
from slime_core.registry.mark import NAME_PATTERN, Mark

__all__ = [
    "advantage",
    "driver",
    "generator",
    "group_filter",
    "hook",
    "kl",
    "loss",
    "reward",
]

T = TypeVar("T", bound=Callable[..., Any])

hook = hookimpl
"""Marks an observer: a function named like a hook of `slime_core.contracts.hookspecs`, with one parameter `event`."""


def driver(group: str, name: str) -> Callable[[T], T]:
    """Names a driver class in any group: `@driver("slime.corrections", "mine")`."""
    if group not in groups.DRIVER_GROUPS:
        raise ValueError(f'@driver("{group}", ...): unknown group; there are {", ".join(groups.DRIVER_GROUPS)}')
    return _marker(group, name, {})


def reward(name: str, *, examples: Sequence[Example] | None = None) -> Callable[[T], T]:
    """`def f(sample) -> float`, `def f(group) -> Sequence[float]`, a Reward, or a RewardDriver. `examples`, here and below,
    are for the contract kit (`slime_core.contracts.example`); a driver has a method of that name instead."""
    return _marker(groups.REWARDS, name, {"examples": _given(examples)})


def group_filter(name: str, *, examples: Sequence[Example] | None = None) -> Callable[[T], T]:
    """`def f(group) -> bool | FilterDecision`, a GroupFilter, or a FilterDriver."""
    return _marker(groups.FILTERS, name, {"examples": _given(examples)})


def generator(name: str) -> Callable[[T], T]:
    """`async def f(episode) -> Sequence[Sample]`, a Generator, or a GeneratorDriver."""
    return _marker(groups.GENERATORS, name, {})


def kl(name: str, *, never_negative: bool | None = None, examples: Sequence[Example] | None = None) -> Callable[[T], T]:
    """`def f(log_probs, ref_log_probs) -> Tensor`, with `ratio` as a third parameter if it clamps; or a KlDriver."""
    return _marker(groups.KL, name, {"never_negative": never_negative, "examples": _given(examples)})


def advantage(
    name: str,
    *,
    needs: Collection[Need] | None = None,
    accepts_kl_penalty: bool | None = None,
    accepts_spans: bool | None = None,
    compares_group: bool | None = None,
    examples: Sequence[Example] | None = None,
) -> Callable[[T], T]:
    """`def f(inputs: CreditInputs) -> Credit`, an AdvantageEstimator, or a driver, which states the rest itself."""
    return _marker(
        groups.ADVANTAGES,
        name,
        {
            "needs": None if needs is None else frozenset(needs),
            "accepts_kl_penalty": accepts_kl_penalty,
            "accepts_spans": accepts_spans,
            "compares_group": None if compares_group is None else classmethod(lambda cls, config: compares_group),
            "examples": _given(examples),
        },
    )


def loss(
    name: str,
    *,
    needs: Collection[Need] | None = None,
    uses_advantages: bool | None = None,
    sequence_level: bool | None = None,
    trains_values: bool | None = None,
    examples: Sequence[Example] | None = None,
) -> Callable[[T], T]:
    """`def f(inputs: LossInputs, segments: Segments) -> LossOutput`, a PolicyLoss, or a driver, as above."""
    return _marker(
        groups.LOSSES,
        name,
        {
            "needs": None if needs is None else frozenset(needs),
            "uses_advantages": uses_advantages,
            "sequence_level": sequence_level,
            "trains_values": trains_values,
            "examples": _given(examples),
        },
    )


def _given(examples: Sequence[Example] | None) -> Any:
    """The `examples` as the class method that a driver has."""
    return None if examples is None else classmethod(lambda cls, folder: examples)


def _marker(group: str, name: str, traits: Mapping[str, Any]) -> Callable[[T], T]:
    if not isinstance(name, str):
        raise TypeError('the decorator takes a name: write @reward("name"), not @reward')
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(f'"{name}" cannot be a name: use letters, digits, - and _')
    mark = Mark(group, name, {key: value for key, value in traits.items() if value is not None})

    def attach(thing: T) -> T:
        cast("Any", thing).__slime__ = mark
        return thing

    return attach
