"""Setup of the engines in tests."""

from types import SimpleNamespace

import numpy as np

from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_serving.in_flight import RequestsInFlight
from slime_sglang.features import Features
from slime_sglang.requests import SglangRequests


def setup_for(model, run_dir, **more):
    settings = {"index": 0, "device": "cpu", "seed": 0, "max_context_len": 600, "max_batch": 32}
    return EngineSetup(model_path=model, run_dir=run_dir, **(settings | more))


def requests_of(fleet):
    """The requests in flight of an engine with these servers."""
    return RequestsInFlight(
        fleet,
        SglangRequests(vocab_size=10, has_tokenizer=True, features=Features(), image_tokens=None, experts=None),
        SimpleNamespace(index=0, max_context_len=100),
        expected_version=lambda: 0,
        request_timeout_s=10,
        control_timeout_s=10,
    )


def short_request(name):
    sampling = SamplingParams(max_new_tokens=5)
    return GenerateRequest(request_id=name, token_ids=np.array([1], np.int32), sampling=sampling, seed=1)
