"""Counters of middlewares are in a step's record under their names."""

from slime_core.rollout.counters import middleware_metrics


class Counting:
    def metrics(self):
        return {"kept": 3, "where": "here"}


def test_middlewares_count_under_their_names():
    assert middleware_metrics({"affinity": Counting()}) == {"perf/router/affinity/kept": 3.0}
