"""What a step's record says of the requests that were served meanwhile."""

import numpy as np

from slime_core.rollout.served import Served, middleware_metrics
from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams


def answered(served, prompt, cached, **extra):
    request = GenerateRequest(
        request_id="r", token_ids=np.zeros(prompt, np.int32), sampling=SamplingParams(max_new_tokens=1), seed=0
    )
    empty = Completion.empty(request, FinishReason.STOP)
    fields = {name: getattr(empty, name) for name in ("request_id", "token_ids", "log_probs", "finish_reason", "spans")}
    served.add(request, Completion(**fields, cached_tokens=cached, extra=extra))


def test_shares_and_means():
    served = Served()
    assert served.take() == {}
    answered(served, 10, 5, spec_accept_rate=0.5)
    answered(served, 30, 5)
    assert served.take() == {
        "perf/served_requests": 2.0,
        "perf/prefix_cache_hit_rate": 0.25,
        "perf/cached_tokens_per_request": 5.0,
        "perf/spec_accept_rate": 0.5,
    }
    assert served.take() == {}


class Counting:
    def metrics(self):
        return {"kept": 3, "where": "here"}


def test_middlewares_count_under_their_names():
    assert middleware_metrics({"affinity": Counting()}) == {"perf/router/affinity/kept": 3.0}
