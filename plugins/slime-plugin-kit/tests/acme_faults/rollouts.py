"""Filters and rewards with one thing wrong."""

import random

import numpy as np

from slime_core.contracts.example import RewardExample
from slime_core.contracts.filter import (
    BufferFilter,
    BufferFilterDriver,
    FilterDecision,
    FilterDriver,
    GroupFilter,
)
from slime_core.contracts.reward import Reward, RewardDriver


def driver_of(base, contract, method):
    """A driver base whose subclasses write the one method of the contract as a static function `run`."""

    def build(cls, config):
        return type(contract.__name__, (contract,), {method: lambda self, *given: cls.run(*given)})()

    return type(f"Faulty{base.__name__}", (base,), {"build": classmethod(build)})


FaultyFilter = driver_of(FilterDriver, GroupFilter, "decide")
FaultyBufferFilter = driver_of(BufferFilterDriver, BufferFilter, "select")
FaultyReward = driver_of(RewardDriver, Reward, "score")

DROP = FilterDecision(keep=False, reason="dull")
KEEP = FilterDecision(keep=True)


class KeepsAll(FaultyFilter):
    """Nothing is wrong with it."""

    @staticmethod
    def run(group):
        return KEEP


class Moody(FaultyFilter):
    """Throws a coin."""

    @staticmethod
    def run(group):
        return random.choice((KEEP, DROP))


class MarksSamples(FaultyFilter):
    """Leaves a note in the metadata."""

    @staticmethod
    def run(group):
        group.samples[0].metadata["seen"] = True
        return KEEP


class NeedsRewards(FaultyFilter):
    """Fails on a group without rewards."""

    @staticmethod
    def run(group):
        return DROP if min(group.rewards) == max(group.rewards) else KEEP


class SilentDrop(FaultyFilter):
    """Gives no reason."""

    @staticmethod
    def run(group):
        return FilterDecision(keep=False)


class TakesFirst(FaultyBufferFilter):
    """Nothing is wrong with it."""

    @staticmethod
    def run(items, num_groups, versions):
        return list(range(min(num_groups, len(items))))


class OldestLast(FaultyBufferFilter):
    """Nothing is wrong with it."""

    @staticmethod
    def run(items, num_groups, versions):
        oldest = [versions.trained if version is None else version for version in versions.oldest]
        return sorted(range(len(items)), key=lambda place: -oldest[place])[:num_groups]


class TakesTurns(FaultyBufferFilter):
    """Remembers how often it was asked."""

    asked = 0

    @classmethod
    def run(cls, items, num_groups, versions):
        cls.asked += 1
        return [(place + cls.asked) % len(items) for place in range(min(num_groups, len(items)))]


class TakesTooMany(FaultyBufferFilter):
    """Does not count."""

    @staticmethod
    def run(items, num_groups, versions):
        return list(range(len(items)))


class TakesAny(FaultyBufferFilter):
    """Draws lots."""

    @staticmethod
    def run(items, num_groups, versions):
        return random.sample(range(len(items)), min(num_groups, len(items)))


class MarksItems(FaultyBufferFilter):
    """Leaves a note in the metadata."""

    @staticmethod
    def run(items, num_groups, versions):
        for item in items[:1]:
            item.prompt.metadata["seen"] = True
        return TakesFirst.run(items, num_groups, versions)


class Length(FaultyReward):
    """Nothing is wrong with it."""

    @staticmethod
    def run(group):
        return [float(len(sample.response)) for sample in group.samples]


class FirstIsBest(FaultyReward):
    """Favours the first sample."""

    @staticmethod
    def run(group):
        return [len(sample.response) - place for place, sample in enumerate(group.samples)]


class Noisy(FaultyReward):
    """Never gives the same number twice."""

    @staticmethod
    def run(group):
        return [random.random() for _ in group.samples]


class NotFinite(FaultyReward):
    """The logarithm of nothing, where the response is empty."""

    @staticmethod
    def run(group):
        with np.errstate(divide="ignore"):
            return [float(np.log(len(sample.response))) for sample in group.samples]


class StumblesOnEmpty(FaultyReward):
    """Looks at the last character, where all are empty."""

    @staticmethod
    def run(group):
        if not any(sample.response for sample in group.samples):
            return [float(ord(sample.response[-1])) for sample in group.samples]
        return Length.run(group)


class WritesMetadata(FaultyReward):
    """Leaves a note in the metadata."""

    @staticmethod
    def run(group):
        for sample in group.samples:
            sample.metadata["seen"] = True
        return Length.run(group)


HERE = []


class KeepsState(FaultyReward):
    """Counts how often it was asked in this process, and starts anew in the next one."""

    @staticmethod
    def run(group):
        import multiprocessing

        extra = 1.0 if multiprocessing.parent_process() is not None else 0.0
        return [number + extra for number in Length.run(group)]


class ComparesRawText(FaultyReward):
    """Compares the label with the text that has the end token."""

    @classmethod
    def examples(cls, folder):
        return [RewardExample(prompt="2+2=", label="4", responses=("4", "", "5"), rewards=(1.0, 0.0, 0.0))]

    @staticmethod
    def run(group):
        return [float(sample.raw_response == str(group.prompt.label)) for sample in group.samples]


class Mistaken(FaultyReward):
    """Other rewards than in its example."""

    @classmethod
    def examples(cls, folder):
        return [RewardExample(prompt="2+2=", label="4", responses=("4", "", "5"), rewards=(1.0, 0.0, 0.0))]

    @staticmethod
    def run(group):
        return [float(sample.response != "5") for sample in group.samples]
