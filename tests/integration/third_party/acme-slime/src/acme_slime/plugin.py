"""Light drivers; what they build imports the rest."""

from pydantic import Field

from slime_core.contracts.advantage import AdvantageDriver
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import AdvantageExample, ExampleSample, KlExample
from slime_core.contracts.kl import KlDriver


def acme(sample):
    """1 if the response contains the label, else 0."""
    return float(str(sample.prompt.label) in sample.response)


class RankConfig(DriverConfig):
    """Options of the rank advantage."""

    rank_scale: float = Field(1.0, gt=0)
    """Largest advantage of a group."""


class RankDriver(AdvantageDriver):
    """Rank within the group, spread evenly over [-rank_scale, rank_scale]; ties share their mean rank."""

    Config = RankConfig

    @classmethod
    def compares_group(cls, config):
        return True

    @classmethod
    def build(cls, config):
        from acme_slime.rank import Rank

        return Rank(config.rank_scale)

    @classmethod
    def examples(cls, folder):
        # The best, the worst and one in the middle.
        samples = [ExampleSample(mask=(1,), reward=reward) for reward in (7.0, -1.0, 0.0)]
        return [
            AdvantageExample(samples=samples, advantages=((1.0,), (-1.0,), (0.0,))),
            AdvantageExample(options={"rank_scale": 2.0}, samples=samples, advantages=((2.0,), (-2.0,), (0.0,))),
        ]


class HalfDriver(KlDriver):
    """Half the squared difference of the log-probs."""

    @classmethod
    def build(cls, config):
        from acme_slime.half import Half

        return Half()

    @classmethod
    def examples(cls, folder):
        # d is 1, then -2.
        return [KlExample(log_probs=(-1.0, -3.0), ref_log_probs=(-2.0, -1.0), values=(0.5, 2.0), gradient=(1.0, -2.0))]
