"""Light drivers; what they build imports the rest."""

from pydantic import Field

from slime_core.contracts.advantage import AdvantageDriver
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.kl import KlDriver


def acme(sample):
    """1 if the answer contains the label, else 0."""
    return float(str(sample.prompt.label) in sample.response)


class RankConfig(DriverConfig):
    """Options of the rank advantage."""

    rank_scale: float = Field(1.0, gt=0)
    """Largest advantage of a group."""


class RankDriver(AdvantageDriver):
    """Rank within the group, spread evenly over [-rank_scale, rank_scale]; ties share their mean rank."""

    Config = RankConfig
    group_baseline = True

    @classmethod
    def build(cls, config):
        from acme_slime.rank import Rank

        return Rank(config.rank_scale)


class HalfDriver(KlDriver):
    """Half the squared difference of the log-probs."""

    @classmethod
    def build(cls, config):
        from acme_slime.half import Half

        return Half()
