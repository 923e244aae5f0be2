"""Setup of the engines in tests, and what tests of servers share."""

from pathlib import Path

import numpy as np
import torch

from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_plugin_kit.tiny_model import buckets_of, log_probs_of

PYTHON = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"
LONG = 1500
"""Tokens of a response that is still running when something happens to it."""
CLOSE = 1e-4
CLOSE_MEAN = 5e-6
"""Nats, of float32 and float64: single tokens of thousands are 2e-5 apart."""


def setup_for(model, run_dir, **more):
    settings = {"index": 0, "device": "cpu", "seed": 0, "max_context_len": 2048, "max_batch": 32, "transport": "direct"}
    return EngineSetup(model_path=model, run_dir=run_dir, **(settings | more))


def asked(name, tokens, seed=0, **sampling):
    params = SamplingParams(**({"max_new_tokens": 24} | sampling))
    return GenerateRequest(request_id=name, token_ids=np.array(tokens, np.int32), sampling=params, seed=seed)


def endless(name, seed=0):
    return asked(name, [5, 6], seed, max_new_tokens=LONG, min_new_tokens=LONG)


def differences(plain, request, response):
    with torch.no_grad():
        expected, _ = log_probs_of(
            plain, request.token_ids.tolist(), response.token_ids.tolist(), request.sampling.temperature
        )
    return (expected - torch.tensor(response.log_probs, dtype=torch.float64)).abs()


def require_close(apart):
    assert apart.max() < CLOSE
    assert apart.mean() < CLOSE_MEAN


async def load(engine, weights, version, *, resume=True):
    await engine.pause()
    for bucket in buckets_of(weights, version, 3):
        await engine.load_bucket(bucket)
    if resume:
        await engine.resume()
