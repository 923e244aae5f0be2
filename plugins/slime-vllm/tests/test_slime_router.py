"""The command slime-router in front of the real vLLM: a conversation as text, and a caller who leaves."""

import asyncio
import contextlib
import sys
from pathlib import Path

import aiohttp
import pytest

pytestmark = pytest.mark.vllm


@contextlib.asynccontextmanager
async def listening(served, model):
    words = ["--program", "vllm", "--port", "0", "--no-token", "--upstream", served.address]
    words += ["--upstream-token-file", str(served.token_file), "--middleware", "session_affinity"]
    words += ["--middleware", f'{{ name = "radix_cache", tokenizer = "{model}" }}']
    command = str(Path(sys.executable).with_name("slime-router"))
    process = await asyncio.create_subprocess_exec(command, *words, stdout=asyncio.subprocess.PIPE)
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        async with aiohttp.ClientSession(line.split("listens on ")[1].split(",")[0]) as session:
            yield session
    finally:
        process.terminate()
        await process.wait()


async def test_a_conversation_as_text_has_the_tokens_of_vllm(served, model):
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    async with listening(served, model) as router:
        body = {"rid": "first", "text": "12+3=", "sampling_params": params, "return_logprob": True}
        async with router.post("/generate", json=body, headers={"x-smg-routing-key": "one"}) as response:
            assert response.status == 200, await response.text()
            first = await response.json()
        prompt = first["meta_info"]["prompt_token_ids"]
        direct = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        status, whole = served.ask("/inference/v1/generate", {"token_ids": prompt, "sampling_params": direct})
        (choice,) = whole["choices"]
        assert (status, first["output_ids"]) == (200, choice["token_ids"])
        content = choice["logprobs"]["content"]
        assert first["meta_info"]["output_token_logprobs"] == [
            [pytest.approx(entry["logprob"], abs=1e-4), entry["token_id"], None] for entry in content
        ]

        long = {"rid": "left", "input_ids": prompt, "sampling_params": params | {"max_new_tokens": 1500}}
        start = served.generated()

        async def ask():
            async with router.post("/generate", json=long) as response:
                await response.read()

        left = asyncio.create_task(ask())
        await served.until_generating()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        before = served.generated()
        while (now := served.generated()) > before:
            before = now
            await asyncio.sleep(0.2)
        assert now - start < 1500
