"""Keys and values on their way from a prefilling to a decoding server, over TCP. By hand: see docs/dev/sglang.md."""

import asyncio

import numpy as np
import pytest
from engine_setup import setup_for

from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_sglang.plugin import Sglang

pytestmark = pytest.mark.mooncake

PAIR = {
    "servers": 2,
    "prefill_servers": 1,
    "router_policy": "round_robin",
    "disaggregation_transfer_backend": "mooncake",
}


def requests():
    """Uneven lengths, some of one token."""
    prompts = [np.random.default_rng(n).integers(2, 25, 1 + 9 * n).astype(np.int32) for n in range(8)]
    return [
        GenerateRequest(
            request_id=f"r{n}",
            token_ids=prompt,
            sampling=SamplingParams(max_new_tokens=1 + 4 * n, min_new_tokens=1 + 4 * n, temperature=0.8),
            seed=n,
        )
        for n, prompt in enumerate(prompts)
    ]


async def generate_text(tiny, run_dir, **options):
    engine = Sglang.build(Sglang.Config(**options))
    await engine.start(setup_for(tiny, run_dir, num_devices=options.get("servers", 1)))
    try:
        async with asyncio.timeout(120):
            return await engine.generate(requests())
    finally:
        await engine.stop()


async def test_a_prefill_decode_pair_responds_like_one_server(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    alone = await generate_text(tiny, tmp_path)
    pair = await generate_text(tiny, tmp_path, **PAIR)
    for one, two in zip(alone, pair, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert one.log_probs.tolist() == two.log_probs.tolist()
        assert [(span.version, span.end) for span in one.spans] == [(span.version, span.end) for span in two.spans]
