"""Recipes of parts of which one is wrong."""

from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.algorithm import Recipe


def recipe(advantage="centred", loss="right", **more):
    return Recipe(summary="Not to be used.", paper="None.", advantage=advantage, loss=loss, **more)


RIGHT = recipe()
MICRO_MEAN = recipe(loss="micro_mean", aggregation=Aggregation.TOKEN_MEAN)
READS_UNDECLARED = recipe(loss="reads_undeclared", aggregation=Aggregation.CONSTANT)
NO_GRAPH = recipe(loss="no_graph")
HALF_PRECISION = recipe(loss="half_precision")
WRONG_BACKWARD = recipe(loss="wrong_backward")
STAYS_NONZERO = recipe(loss="stays_nonzero")
READS_MASKED_TOKENS = recipe(advantage="reads_masked_tokens")
BY_NEIGHBOUR = recipe(advantage="by_neighbour")
ALWAYS_LEARNS = recipe(advantage="always_learns")
READS_VALUES = recipe(advantage="reads_values")
NO_SUCH_PART = recipe(loss="no_such_loss")
NO_SUCH_OPTION = recipe(options={"eps_clip": 0.2})
