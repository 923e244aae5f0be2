"""Backends and engines with something wrong, around those of slime-fsdp and slime-local."""

from slime_core.contracts.backend import Layout
from slime_fsdp.plugin import Fsdp
from slime_local.plugin import Local


class FaultyBackend(Fsdp):
    """`name`: which class of acme_faults.model_classes is built."""

    name = "FsdpBackend"

    @classmethod
    def build(cls, config):
        from acme_faults import model_classes

        return getattr(model_classes, cls.name)(config)

    @classmethod
    def examples(cls, folder):
        return []


class FaultyEngine(Local):
    """As above."""

    name = "Engine"

    @classmethod
    def build(cls, config):
        from acme_faults import model_classes

        return getattr(model_classes, cls.name)(config)


def backend(class_name):
    return type(class_name, (FaultyBackend,), {"name": class_name, "__doc__": class_name})


def engine(class_name):
    return type(class_name, (FaultyEngine,), {"name": class_name, "__doc__": class_name})


CARELESS_SUMS = backend("CarelessSums")
UNREPEATABLE = backend("Unrepeatable")
CARELESS_STATE = backend("CarelessState")
CARELESS_CHECKS = backend("CarelessChecks")

SHIFTED_LOG_PROBS = engine("ShiftedLogProbs")
CARELESS_SAMPLING = engine("CarelessSampling")
CARELESS_CONTROL = engine("CarelessControl")
CARELESS_VERSIONS = engine("CarelessVersions")
BLOCKS = engine("Blocks")


class OneReports(FaultyBackend):
    """Only the first rank reports its sums; and gradients have a factor too much."""

    name = "TwiceTheGradient"

    @classmethod
    def layout(cls, config, rank, world_size):
        return Layout(dp_rank=rank, dp_size=world_size, reports=rank == 0)
