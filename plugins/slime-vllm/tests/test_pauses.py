"""Pauses that keep requests, sleep, and guided decoding, on a real vLLM server."""

import asyncio
import json

import numpy as np
import pytest
import torch
from vllm_setup import LONG, asked, differences, endless, load, require_close

from slime_core.contracts.engine import Capability, MemoryTag
from slime_core.errors import EngineError, EngineRefused
from slime_core.types.completion import FinishReason
from slime_plugin_kit.tiny_model import load_plain, moved, named_weights

pytestmark = pytest.mark.vllm


async def test_requests_wait_inside_vllm(attached, served, model):
    """With `retract` they stay on the server; what they have is computed again with the new weights."""
    async with attached(pause_mode="retract") as engine:
        plain = load_plain(model, torch.float32)
        await load(engine, named_weights(plain), 11)
        requests = [endless(f"k{n}", n) for n in range(3)]
        running = asyncio.create_task(engine.generate(requests))
        await served.until_generating()
        await engine.pause()
        before = served.generated()
        with pytest.raises(EngineRefused, match="sleep while 3 requests run"):
            await engine.sleep()
        await engine.health()
        assert served.generated() == before
        changed = moved(plain, seed=1)
        await load(engine, named_weights(changed), 12)
        changed = changed.double()
        for request, response in zip(requests, await running, strict=True):
            assert [span.version for span in response.spans] == [11, 12]
            assert (response.finish_reason, len(response.token_ids)) == (FinishReason.LENGTH, LONG)
            require_close(differences(changed, request, response)[response.spans[1].start :])


async def test_memory_is_released_and_weights_come_back(attached, served, model):
    """As the kernel calls it: everything, then the weights alone for an update, then the rest."""
    async with attached() as engine:
        plain = load_plain(model, torch.float32)
        await load(engine, named_weights(plain), 13)
        await engine.pause()
        await engine.sleep()
        assert served.ask("/is_sleeping")[1] == {"is_sleeping": True}
        await engine.health()
        with pytest.raises(EngineRefused, match="while asleep"):
            await engine.generate([asked("early", [4, 5])])
        with pytest.raises(EngineError, match="require a paused engine that is awake"):
            await engine.endpoints()
        await engine.wake_up([MemoryTag.WEIGHTS])
        changed = moved(plain, seed=2)
        await load(engine, named_weights(changed), 14, resume=False)
        await engine.wake_up([MemoryTag.KV_CACHE, MemoryTag.GRAPHS])
        await engine.resume()
        request = asked("awake", [4, 5])
        (response,) = await engine.generate([request])
        require_close(differences(changed.double(), request, response))

        await engine.pause()
        await engine.sleep([MemoryTag.KV_CACHE, MemoryTag.GRAPHS])
        await engine.sleep([MemoryTag.WEIGHTS])
        await engine.wake_up()
        await engine.resume()
        (again,) = await engine.generate([request])
        assert again.token_ids.tolist() == response.token_ids.tolist()


async def test_dropped_weights_must_be_sent(attached, model):
    async with attached(sleep_level=2) as engine:
        plain = load_plain(model, torch.float32)
        await load(engine, named_weights(plain), 15)
        await engine.pause()
        await engine.sleep()
        await engine.wake_up()
        # The engine is well: a run must not replace it.
        with pytest.raises(
            EngineRefused, match=r"Call update_weights first, or set engine\.sleep_level = 1 \(--vllm-sleep"
        ):
            await engine.resume()
        await load(engine, named_weights(plain), 16)
        assert await engine.version() == 16


async def test_a_structural_tag_restricts_what_is_sampled(attached, model):
    """The log-probs are of the tokens that it allows, and more than one form of it may be sampled."""
    async with attached() as engine:
        assert Capability.STRUCTURAL_TAG in engine.capabilities(engine._setup)
        await load(engine, named_weights(load_plain(model, torch.float32)), 17)
        tag = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "[0-9]{3}"}})
        found = set()
        for response in await engine.generate([asked(f"g{n}", [4, 5], n, structural_tag=tag) for n in range(6)]):
            assert np.isfinite(response.log_probs).all()
            found.add(tuple(response.token_ids.tolist()))
        assert len(found) > 1
        assert {len(tokens) for tokens in found} == {4}
