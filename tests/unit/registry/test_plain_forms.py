"""Functions and contract classes where a driver is expected."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime_core import groups
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.needs import Need
from slime_core.errors import PluginError
from slime_core.registry import Registry

SOURCE = """
from slime_core.contracts.advantage import Credit
from slime_core.contracts.filter import FilterDecision
from slime_core.contracts.loss import LossOutput
from slime_core.contracts.needs import Need
from slime_core.contracts.reward import Reward
from slime_core.plugin import loss, advantage

def each(sample):
    "Counts."
    return float(len(sample.response))

def ranked(group):
    return [float(i) for i, _ in enumerate(group.samples)]

class Best(Reward):
    def score(self, group):
        return [9.0 for _ in group.samples]

class Greedy(Reward):
    def __init__(self, appetite):
        self.appetite = appetite
    def score(self, group):
        return []

def keep(group):
    return len(group.samples) > 1

def numpy_keep(group):
    import numpy
    return numpy.bool_(False)

def decide(group):
    return FilterDecision(keep=False, reason="mood", keep_when_insufficient=True)

def forgot(group):
    pass

def squared(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs) ** 2

def clamped(log_probs, ref_log_probs, ratio=None):
    d = log_probs - ref_log_probs
    return (d if ratio is None else ratio * d).clamp(-1, 1)

async def twice(episode):
    return [episode, episode]

def not_async(episode):
    return [episode]

async def late(sample):
    return 1.0

def two(sample, label):
    return 1.0

@advantage("flat", needs={Need.VALUES}, compares_group=True)
def flat(inputs):
    return Credit(advantages=inputs.rewards.astype("float32"))

@loss("linear", needs=set(), sequence_level=True)
def linear(inputs, segments):
    return LossOutput(values=-inputs.log_probs * inputs.advantages)

def plain_loss(inputs, segments):
    return LossOutput(values=inputs.log_probs)
"""

NAMES = {
    groups.REWARDS: ["each", "ranked", "Best", "Greedy", "late", "two"],
    groups.FILTERS: ["keep", "numpy_keep", "decide", "forgot"],
    groups.KL: ["squared", "clamped"],
    groups.GENERATORS: ["twice", "not_async"],
    groups.ADVANTAGES: ["flat"],
    groups.LOSSES: ["linear", "plain_loss"],
}
GROUP = SimpleNamespace(samples=(SimpleNamespace(response="ab"), SimpleNamespace(response="")))
ALONE = SimpleNamespace(samples=GROUP.samples[:1])


@pytest.fixture
def build(site):
    points = {group: {name.lower(): f"acme_plain:{name}" for name in names} for group, names in NAMES.items()}
    site.add("acme-slime", points, {"acme_plain": SOURCE})
    registry = Registry()

    def driver_and_object(group, name):
        driver = registry.resolve(group, f"acme-slime/{name}", where="here").driver
        return driver, driver.build(driver.Config())

    return driver_and_object


def test_rewards(build):
    driver, call_all = build(groups.REWARDS, "each")
    assert driver.Config is DriverConfig
    assert driver.__doc__ == "Counts."
    assert call_all.score(GROUP) == [2.0, 0.0]
    assert build(groups.REWARDS, "ranked")[1].score(GROUP) == [0.0, 1.0]
    assert build(groups.REWARDS, "best")[1].score(GROUP) == [9.0, 9.0]


def test_filters(build):
    _, keep = build(groups.FILTERS, "keep")
    assert keep.decide(GROUP).keep is True
    dropped = keep.decide(ALONE)
    assert (dropped.keep, dropped.reason) == (False, "keep")
    assert build(groups.FILTERS, "numpy_keep")[1].decide(GROUP).keep is False
    decision = build(groups.FILTERS, "decide")[1].decide(GROUP)
    assert (decision.reason, decision.keep_when_insufficient) == ("mood", True)
    # The run refuses it, with the prompt.
    assert build(groups.FILTERS, "forgot")[1].decide(GROUP) is None


def test_kl_ratio_multiplies_outside_or_is_passed_to_an_estimator_that_clamps(build):
    new, ref, ratio = torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.0]), torch.tensor([0.5, 0.2])
    _, squared = build(groups.KL, "squared")
    torch.testing.assert_close(squared(new, ref), torch.tensor([0.25, 9.0]))
    torch.testing.assert_close(squared(new, ref, ratio), torch.tensor([0.125, 1.8]))
    _, clamped = build(groups.KL, "clamped")
    torch.testing.assert_close(clamped(new, ref), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(clamped(new, ref, ratio), torch.tensor([0.25, 0.6]))


async def test_generator(build):
    assert await build(groups.GENERATORS, "twice")[1].generate("episode") == ["episode", "episode"]


def test_advantage_and_loss_with_the_decorators_traits(build):
    driver, flat = build(groups.ADVANTAGES, "flat")
    assert driver.needs == frozenset({Need.VALUES})
    assert (driver.compares_group(driver.Config()), driver.accepts_kl_penalty) == (True, False)
    np.testing.assert_array_equal(flat.estimate(SimpleNamespace(rewards=np.array([1.0, 2.0]))).advantages, [1, 2])
    driver, linear = build(groups.LOSSES, "linear")
    assert (driver.needs, driver.sequence_level, driver.uses_advantages) == (frozenset(), True, True)
    output = linear(SimpleNamespace(log_probs=torch.tensor([2.0]), advantages=torch.tensor([3.0])), None)
    assert output.values.tolist() == [-6.0]
    assert build(groups.LOSSES, "plain_loss")[0].needs == frozenset({Need.OLD_LOGPROBS})


@pytest.mark.parametrize(
    ("group", "name", "expected"),
    [
        (groups.REWARDS, "late", "the function late is async"),
        (groups.REWARDS, "two", r"the function two\(sample, label\) has other parameters; write def reward\(sample\)"),
        (groups.REWARDS, "greedy", "the class Greedy needs arguments, which only a RewardDriver can give it"),
        (groups.GENERATORS, "not_async", "the function not_async is not async; write async def generate"),
    ],
)
def test_the_error_of_an_unusable_plain_form_gives_the_reason(build, group, name, expected):
    with pytest.raises(PluginError, match=expected):
        build(group, name)
