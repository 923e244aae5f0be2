"""On one GPU: the same tokens and log-probs as on the CPU, bfloat16, sleep and wake."""

import asyncio

import local_oracle as oracle
import numpy as np
import pytest
import torch

from slime_core.contracts.setup import EngineSetup
from slime_local.plugin import Local

pytestmark = pytest.mark.gpu


async def started(folder, **options):
    engine = Local.build(Local.Config(**options))
    await engine.start(
        EngineSetup(
            index=0, model_path=folder, device="cuda", seed=0, max_context_len=128, max_batch=64, run_dir=folder
        )
    )
    return engine


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_float32_equals_transformers_on_the_cpu(family, request):
    folder = request.getfixturevalue(family)
    model = oracle.plain_model(folder)
    prompts = oracle.prompts(20, seed=40)

    async def run():
        engine = await started(folder, max_running=7, dtype="float32")
        requests = [
            oracle.request(
                i, p, seed=i, temperature=float(i % 3 > 0), top_k=5 if i % 3 == 2 else -1, max_new_tokens=5 + i
            )
            for i, p in enumerate(prompts)
        ]
        first, again = await engine.generate(requests), await engine.generate(requests)
        await engine.stop()
        return first, again

    first, again = asyncio.run(run())
    for i, (prompt, response, second) in enumerate(zip(prompts, first, again, strict=True)):
        if i % 3 == 0:
            assert response.token_ids.tolist() == oracle.greedy(model, prompt, 5 + i)
        expected = oracle.log_probs(model, prompt, response.token_ids)
        np.testing.assert_allclose(response.log_probs, expected, atol=1e-3, rtol=0)
        assert response.token_ids.tobytes() == second.token_ids.tobytes()
        assert response.log_probs.tobytes() == second.log_probs.tobytes()


def test_bfloat16_sleep_and_new_weights(qwen3):
    model = oracle.other_weights(qwen3, 9).to(torch.bfloat16)
    exact = model.float()

    async def run():
        engine = await started(qwen3)
        before = torch.cuda.memory_allocated()
        await engine.sleep()
        assert torch.cuda.memory_allocated() < before
        await engine.wake_up()
        running = asyncio.ensure_future(
            engine.generate(
                [
                    oracle.request(i, p, seed=i, max_new_tokens=40, min_new_tokens=40)
                    for i, p in enumerate(oracle.prompts(9, seed=41))
                ]
            )
        )
        for _ in range(10):
            await asyncio.sleep(0)
        await engine.pause()
        for bucket in oracle.buckets(oracle.other_weights(qwen3, 9).to(torch.bfloat16), 1):
            await engine.load_bucket(bucket)
        await engine.resume()
        responses = await running
        await engine.stop()
        return responses

    for prompt, response in zip(oracle.prompts(9, seed=41), asyncio.run(run()), strict=True):
        assert [span.version for span in response.spans] == [-1, 1]
        start = response.spans[1].start
        assert 0 < start < 40
        expected = oracle.log_probs(exact, prompt, response.token_ids)[start:]
        assert np.abs(response.log_probs[start:] - expected).mean() < 0.1
