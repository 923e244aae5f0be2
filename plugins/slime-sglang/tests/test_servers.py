"""Two real servers behind the real sglang-router, in bfloat16; weight updates with waiting requests; many requests."""

import asyncio
import os
import signal

import numpy as np
import pytest
import torch
from engine_setup import setup_for
from through_middlewares import require_middlewares

from slime_core.contracts.engine import Capability
from slime_core.errors import EngineError
from slime_core.types.completion import FinishReason
from slime_core.workers.local import STOP_S
from slime_plugin_kit.tiny_model import buckets_of, load_plain, log_probs_of, moved, named_weights, prompts
from slime_plugin_kit.tiny_serving import ask, long, tokens_of
from slime_sglang.plugin import Sglang

pytestmark = pytest.mark.sglang

BF16_NATS = 0.25
"""bfloat16 has eight bits: single log-probs of this model are off by up to 0.10 to 0.17, as the processor rounds."""
BF16_MEAN_NATS = 0.03


async def load(engine, model, version):
    await engine.pause()
    for bucket in buckets_of(named_weights(model), version, 2):
        await engine.load_bucket(bucket)
    await engine.resume()


def require_close(model, requests, responses):
    apart = []
    for request, response in zip(requests, responses, strict=True):
        with torch.no_grad():
            exact = log_probs_of(model, request.token_ids.tolist(), tokens_of(response))[0].numpy()
        apart.append(np.abs(response.log_probs - exact))
    assert np.concatenate(apart).max() <= BF16_NATS
    assert np.concatenate(apart).mean() <= BF16_MEAN_NATS


async def until_unwell(engine):
    while True:
        await engine.health()
        await asyncio.sleep(0.05)


async def test_two_servers_behind_a_router(tiny, tmp_path):
    engine = Sglang.build(Sglang.Config(servers=2, router_policy="round_robin", dtype="bfloat16", start_timeout=240))
    info = await engine.start(setup_for(tiny, tmp_path, num_devices=2))
    try:
        assert Capability.DETERMINISTIC in info.capabilities
        assert len(await asyncio.gather(*(engine.health() for _ in range(2)))) == 2
        requests = [ask(number, prompt) for number, prompt in enumerate(prompts(12, seed=1))]
        model = load_plain(tiny)
        require_close(model, requests, await engine.generate(requests))
        logs = [(tmp_path / "logs" / f"sglang-0-{place}.log").read_text() for place in range(2)]
        assert all(log.count("Prefill batch") > 1 for log in logs), "the router has left a server out"

        # A weight update during requests: both servers get it, the requests continue, and spans are exact.
        running = [asyncio.ensure_future(engine.generate([long(number)])) for number in range(4)]
        await asyncio.sleep(0.15)
        new = moved(load_plain(tiny, torch.float32), 5)
        await load(engine, new, 3)
        assert await engine.version() == 3
        assert len(await engine.checksum()) == 16
        for number, task in enumerate(running):
            (response,) = await task
            assert response.finish_reason is FinishReason.LENGTH
            # One may have ended before the weights came.
            assert [span.version for span in response.spans] in ([-1, 3], [3], [-1])
            assert response.spans[-1].end == len(response.token_ids) == long(number).sampling.max_new_tokens
        require_close(new.double(), requests, await engine.generate(requests))

        # Workers leave and come back while the router runs.
        router, server = engine._fleet.router, engine._fleet.servers[1]
        await router.remove(server)
        assert server.address not in await router.workers()
        assert len(await engine.generate(requests)) == len(requests)
        await router.add(server)
        assert server.address in await router.workers()

        await require_middlewares(router.connection, tiny, tmp_path)

        # In turn, so that one is on the server that dies; the other one's may have ended before the death is noticed.
        waiting = asyncio.gather(*(engine.generate([long(number)]) for number in (9, 10)))
        await asyncio.sleep(0.1)
        os.kill(info.pid, signal.SIGKILL)
        with pytest.raises(EngineError):
            await waiting
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            await until_unwell(engine)
        # The other one hangs: a lost engine is ended by this call, and its memory is requested by then.
        hung = engine._fleet._processes[1].pid
        os.killpg(hung, signal.SIGSTOP)
        async with asyncio.timeout(STOP_S):
            await engine.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
    finally:
        await engine.stop()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_weights_change_under_waiting_requests(mode, attached, tiny, tmp_path):
    """SGLang keeps the requests; its spans give each token's version, and the log-probs of new tokens are exact if their keys
    and values are computed again."""
    plain = attached()
    await plain.start(setup_for(tiny, tmp_path))
    spans_by_token = plain._features.version_spans
    await plain.stop()
    engine = attached(pause_mode=mode)
    if not spans_by_token:
        with pytest.raises(EngineError, match="requires a server that reports versions by token span"):
            await engine.start(setup_for(tiny, tmp_path))
        return
    await engine.start(setup_for(tiny, tmp_path))
    try:
        one, other = load_plain(tiny, torch.float32), moved(load_plain(tiny, torch.float32), 4)
        await load(engine, one, 0)
        for attempt, delay in enumerate((0.1, 0.03, 0.3)):
            before, after = 2 * attempt, 2 * attempt + 1
            if attempt:
                await load(engine, one, before)
            request = long(attempt)
            running = asyncio.ensure_future(engine.generate([request]))
            await asyncio.sleep(delay)
            await load(engine, other, after)
            (response,) = await running
            if [span.version for span in response.spans] == [before, after]:
                break
        else:
            raise AssertionError(f"the weights never changed in the middle of a response: {response.spans}")
        assert len(response.token_ids) == request.sampling.max_new_tokens
        split = response.spans[0].end
        with torch.no_grad():
            old = log_probs_of(one, request.token_ids.tolist(), tokens_of(response))[0].numpy()
            new = log_probs_of(other, request.token_ids.tolist(), tokens_of(response))[0].numpy()
        assert np.abs(response.log_probs[:split] - old[:split]).max() <= 1e-4
        apart = np.abs(response.log_probs[split:] - new[split:]).max()
        # In place the old keys and values stay, and new tokens are of neither version alone.
        assert (apart <= 1e-4) == (mode == "retract")
    finally:
        await engine.stop()


async def test_many_requests_in_flight(attached, tiny, tmp_path):
    """More than the server runs at once, on one pool of connections, responded each once."""
    engine = attached()
    await engine.start(setup_for(tiny, tmp_path, max_batch=10_000))
    try:
        requests = [ask(n, [3 + n % 20], name=f"many/{n}", max_new_tokens=2) for n in range(10_000)]
        names = [response.request_id async for response in engine.stream(requests)]
        assert sorted(names) == sorted(request.request_id for request in requests)
    finally:
        await engine.stop()
