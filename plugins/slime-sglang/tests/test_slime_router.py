"""slime-router in front of the real SGLang with nothing between: streams, and a caller who leaves."""

import asyncio
import json

import pytest
from through_middlewares import listening

pytestmark = pytest.mark.sglang

PROMPT = [3, 5, 7]
LONG = 500
LOGGED = 40
"""Steps between two lines of SGLang's log about decoding."""


def ask(rid, count, **more):
    sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
    return {"rid": rid, "input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **more}


async def events(response):
    async for line in response.content:
        text = line.decode().removeprefix("data:").strip()
        if text and text != "[DONE]":
            yield json.loads(text)


def content(response):
    return response["output_ids"], response["meta_info"]["output_token_logprobs"]


async def test_a_stream_has_the_tokens_of_the_whole_response(served, tmp_path):
    served.renew()
    direct = served.ask("/generate", ask("direct", 12))
    async with listening(upstreams=[served.address], token=served.token, folder=tmp_path) as session:
        async with session.post("/generate", json=ask("whole", 12)) as response:
            assert response.status == 200, await response.text()
            whole = await response.json()
        async with session.post("/generate", json=ask("streamed", 12, stream=True)) as response:
            parts = [part async for part in events(response)]
        async with session.get("/metrics") as response:
            metrics = await response.text()
    assert content(whole) == content(direct)
    assert len(parts) > 2
    assert content(parts[-1]) == content(whole)
    assert f'slime_router_upstream_requests_total{{url="{served.address}"}} 2' in metrics


async def test_a_disconnected_caller_ends_the_request_in_the_engine(served, tmp_path):
    served.renew()

    def decoded():
        return served.log.read_text(errors="replace").count("Decode batch")

    before = decoded()
    async with listening(upstreams=[served.address], token=served.token, folder=tmp_path) as session:
        async with session.post("/generate", json=ask("left", LONG, stream=True)) as response:
            await anext(events(response))
        # It refuses while anything runs.
        while True:
            try:
                await asyncio.to_thread(served.ask, "/flush_cache", {})
                break
            except OSError:
                await asyncio.sleep(0.05)
    assert decoded() - before < LONG / LOGGED / 2
