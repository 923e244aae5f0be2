"""Drivers around plain functions, and around classes of the contract itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from slime_core import groups
from slime_core.contracts.advantage import AdvantageDriver, AdvantageEstimator
from slime_core.contracts.filter import FilterDecision, FilterDriver, GroupFilter
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.kl import KlDriver, KlEstimator
from slime_core.contracts.loss import LossDriver, PolicyLoss
from slime_core.contracts.reward import Reward, RewardDriver, RewardValue
from slime_core.registry.mark import mark_of

if TYPE_CHECKING:
    from torch import Tensor

    from slime_core.types.sample import SampleGroup

Function = Callable[..., Any]


class FunctionReward(Reward):
    """`f(group)`, which gives one value per sample; or `f(sample)`, called for each sample of the group."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._takes_group = next(iter(inspect.signature(function).parameters), "") == "group"

    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        if self._takes_group:
            values: Sequence[RewardValue] = self._function(group)
            return values
        return [self._function(sample) for sample in group.samples]


class FunctionFilter(GroupFilter):
    """`f(group)`, which gives a decision, or True to keep; what it drops is counted under its name."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._name = function.__name__

    def decide(self, group: SampleGroup) -> FilterDecision:
        import numpy as np

        response = self._function(group)
        if isinstance(response, bool | np.bool_):
            return FilterDecision(keep=bool(response), reason="" if response else self._name)
        # Anything else is refused where decisions are checked, with the group.
        decision: FilterDecision = response
        return decision


class FunctionKl(KlEstimator):
    """`f(log_probs, ref_log_probs)`, multiplied by the ratio where one is given; or `f(log_probs, ref_log_probs,
    ratio)`, for an estimator that clamps, since the ratio belongs before a clamp."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._takes_ratio = _accepts(function, 3)

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor, ratio: Tensor | None = None) -> Tensor:
        if self._takes_ratio:
            estimate: Tensor = self._function(log_probs, ref_log_probs, ratio)
            return estimate
        estimate = self._function(log_probs, ref_log_probs)
        return estimate if ratio is None else ratio * estimate


def as_method(contract: type, method: str) -> Callable[[Function], Any]:
    """Turns a plain function into an object of the contract: the function is its one method, of this name."""
    return lambda function: type(function.__name__, (contract,), {method: staticmethod(function)})()


@dataclass(frozen=True, slots=True)
class PlainForm:
    """The functions and classes that a group accepts beside drivers."""

    driver: type
    contract: type
    """Subclasses that are made without arguments are accepted."""
    wrap: Callable[[Function], Any]
    signature: str
    num_arguments: tuple[int, ...]
    is_async: bool = False


PLAIN_FORMS: Final[Mapping[str, PlainForm]] = {
    groups.REWARDS: PlainForm(RewardDriver, Reward, FunctionReward, "def reward(sample) or def reward(group)", (1,)),
    groups.FILTERS: PlainForm(FilterDriver, GroupFilter, FunctionFilter, "def keep(group)", (1,)),
    groups.KL: PlainForm(
        KlDriver, KlEstimator, FunctionKl, "def kl(log_probs, ref_log_probs), with or without ratio", (2, 3)
    ),
    groups.GENERATORS: PlainForm(
        GeneratorDriver, Generator, as_method(Generator, "generate"), "async def generate(episode)", (1,), is_async=True
    ),
    groups.ADVANTAGES: PlainForm(
        AdvantageDriver, AdvantageEstimator, as_method(AdvantageEstimator, "estimate"), "def estimate(inputs)", (1,)
    ),
    groups.LOSSES: PlainForm(
        LossDriver, PolicyLoss, as_method(PolicyLoss, "__call__"), "def loss(inputs, segments)", (2,)
    ),
}


def is_plain(group: str, thing: object) -> bool:
    """True if `thing` is a plain form: a function, or a class of the group's contract."""
    form = PLAIN_FORMS.get(group)
    if form is None:
        return False
    return inspect.isroutine(thing) or (isinstance(thing, type) and issubclass(thing, form.contract))


def plain_problem(group: str, thing: Any) -> str:
    """The reason why `thing` cannot be made a driver; empty if it can."""
    form = PLAIN_FORMS[group]
    if isinstance(thing, type):
        missing = sorted(getattr(thing, "__abstractmethods__", ()))
        if missing:
            return f"the class {thing.__name__} does not implement {', '.join(missing)}"
        if not _accepts(thing, 0):
            return f"the class {thing.__name__} needs arguments, which only a {form.driver.__name__} can give it"
        return ""
    if inspect.iscoroutinefunction(thing) != form.is_async:
        return f"the function {thing.__name__} is{' not' if form.is_async else ''} async; write {form.signature}"
    if not any(_accepts(thing, count) for count in form.num_arguments):
        return f"the function {thing.__name__}{inspect.signature(thing)} has other parameters; write {form.signature}"
    return ""


def as_driver(group: str, name: str, thing: Any) -> Any:
    """A driver without options around a plain form. Its class variables come from the decorator, if there was one."""
    form = PLAIN_FORMS[group]
    mark = mark_of(thing)

    def build(cls: type, config: Any) -> Any:
        return thing() if isinstance(thing, type) else form.wrap(thing)

    body = {
        "__doc__": thing.__doc__,
        "__module__": thing.__module__,
        "build": classmethod(build),
        **(mark.traits if mark else {}),
    }
    return type(form.driver)(f"{thing.__name__}_driver", (form.driver,), body)


def _accepts(thing: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(thing).bind(*range(count))
    except TypeError:
        return False
    return True
