"""Setup of the engines in tests."""

from types import SimpleNamespace

import numpy as np

from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_sglang.in_flight import RequestsInFlight


def setup_for(model, run_dir, **more):
    settings = {"index": 0, "device": "cpu", "seed": 0, "max_context_len": 600, "max_batch": 32}
    return EngineSetup(model_path=model, run_dir=run_dir, **(settings | more))


def requests_of(fleet):
    """The requests in flight of an engine with these servers."""
    return RequestsInFlight(
        fleet,
        SimpleNamespace(pause_mode="abort", request_timeout=10, control_timeout=10),
        SimpleNamespace(index=0, max_context_len=100),
        check=SimpleNamespace(problem=lambda *request: None, vocab_size=10, image_tokens=None),
        experts=None,
        version=lambda: 0,
    )


def short_request(name):
    sampling = SamplingParams(max_new_tokens=5)
    return GenerateRequest(request_id=name, token_ids=np.array([1], np.int32), sampling=sampling, seed=1)
