"""Each sampling parameter gives log-probs of the distribution that was sampled from, computed here by transformers alone."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper
from vllm_setup import LONG, asked, differences, require_close

from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_plugin_kit.tiny_model import buckets_of, load_plain, logits_of, named_weights

pytestmark = pytest.mark.vllm

CLOSE = 1e-4
WAYS = {
    "repetition_penalty": ({"repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4)]),
    "top_k": ({"top_k": 4}, [TopKLogitsWarper(4)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
}


@torch.no_grad()
def expected(plain, prompt, response, temperature, processors):
    """Log-probs of the response: logits, penalties, temperature, then what cuts the distribution."""
    tokens = [*prompt, *response]
    found = []
    for place in range(len(prompt), len(tokens)):
        scores = logits_of(plain, tokens[:place])[-1:]
        read = torch.tensor([tokens[:place]])
        for processor in processors:
            is_penalty = isinstance(processor, RepetitionPenaltyLogitsProcessor)
            scores = processor(read, scores) if is_penalty else processor(read, scores / temperature)
            if not is_penalty:
                scores = scores * temperature
        found.append(float((scores / temperature).log_softmax(-1)[0, tokens[place]]))
    return np.array(found)


async def test_log_probs_are_of_what_was_sampled_from(attached, model):
    plain = load_plain(model)
    requests = [
        GenerateRequest(
            request_id=name,
            token_ids=np.array([5, 6, 5, 9], np.int32),
            sampling=SamplingParams(max_new_tokens=24, min_new_tokens=24, temperature=0.8, **params),
            seed=7,
        )
        for name, (params, _) in WAYS.items()
    ]
    async with attached() as engine:
        await engine.pause()
        await engine.load_bucket(*buckets_of(named_weights(load_plain(model, torch.float32)), 0, 1))
        await engine.resume()
        responses = await engine.generate(requests)
    for request, response in zip(requests, responses, strict=True):
        true = expected(
            plain, request.token_ids.tolist(), response.token_ids.tolist(), 0.8, WAYS[request.request_id][1]
        )
        assert np.abs(response.log_probs - true).max() < CLOSE, request.request_id


async def test_a_penalty_counts_the_tokens_from_before_an_update(attached, served, model):
    """After new weights the response so far is a prompt to the server."""
    weights = named_weights(load_plain(model, torch.float32))
    request = GenerateRequest(
        request_id="penalized",
        token_ids=np.array([5, 6], np.int32),
        sampling=SamplingParams(max_new_tokens=LONG, min_new_tokens=LONG, repetition_penalty=1.4),
        seed=7,
    )
    async with attached() as engine:
        for version in (0, 1):
            await engine.pause()
            await engine.load_bucket(*buckets_of(weights, version, 1))
            await engine.resume()
            if not version:
                running = asyncio.create_task(engine.generate([request]))
                await served.until_generating(10)
        (response,) = await running
    assert [span.version for span in response.spans] == [0, 1]
    after = response.spans[1].start
    tokens = response.token_ids.tolist()[: after + 8]
    true = expected(load_plain(model), [5, 6, *tokens[:after]], tokens[after:], 1.0, WAYS["repetition_penalty"][1])
    assert np.abs(response.log_probs[after : after + 8] - true).max() < CLOSE


async def test_prompts_that_do_not_fit_into_one_step(attached, served, model):
    """vLLM for CPUs dies of a prompt that it reads in two steps, if the request has a seed."""
    served.renew()
    plain = load_plain(model)
    rng = np.random.default_rng(3)
    requests = [asked(f"long-{seed}", rng.integers(4, 24, 1900), seed, max_new_tokens=4) for seed in range(8)]
    async with attached() as engine:
        responses = await engine.generate(requests)
    for request, response in zip(requests, responses, strict=True):
        require_close(differences(plain, request, response))
