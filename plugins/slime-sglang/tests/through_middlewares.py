"""The command slime-router with all its middlewares, in front of sglang-router, and what each of them does there."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import aiohttp

OUTERMOST_FIRST = (
    '{{ name = "radix_cache", tokenizer = "{model}" }}',
    '{{ name = "record", path = "{folder}/recording.jsonl" }}',
    '{{ name = "retry", backoff_s = 0.01 }}',
    '{{ name = "priority", concurrency = 2, levels = {{ urgent = 1 }} }}',
    '{{ name = "rate_limit", requests_per_second = 8, burst = 1 }}',
    "load_balance",
    "session_affinity",
)


@contextlib.asynccontextmanager
async def listening(*words, upstreams, token, folder):
    """The command slime-router in front of these addresses, which ask for the token."""
    (folder / "upstream-token").write_text(token)
    words = ["--port", "0", "--no-token", "--upstream-token-file", str(folder / "upstream-token"), *words]
    for address in upstreams:
        words += ["--upstream", address]
    command = str(Path(sys.executable).with_name("slime-router"))
    process = await asyncio.create_subprocess_exec(command, *words, stdout=asyncio.subprocess.PIPE)
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        async with aiohttp.ClientSession(line.split("listens on ")[1].split(",")[0]) as session:
            yield session
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def routed(router, model, folder):
    """The same sglang-router behind two names: two upstreams to choose from."""
    # No probe but the first finds out that a worker is dead.
    words = ["--health-interval", "600"]
    for middleware in OUTERMOST_FIRST:
        words += ["--middleware", middleware.format(model=model, folder=folder)]
    upstreams = (router.address, router.address.replace("127.0.0.1", "localhost"))
    async with listening(*words, upstreams=upstreams, token=router.token, folder=folder) as session:
        yield Routed(session)


class Routed:
    def __init__(self, session):
        self._session = session

    async def generate(self, rid, text, count=4, session=None):
        sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
        body = {"rid": rid, "text": text, "sampling_params": sampling, "return_logprob": True}
        headers = {} if session is None else {"X-SMG-Routing-Key": session}
        async with self._session.post("/generate", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def add(self, url):
        async with self._session.post("/workers", json={"url": url}) as response:
            assert response.status < 300, await response.text()

    async def counters(self):
        """`upstream.URL.requests` and `MIDDLEWARE.COUNTER`."""
        async with self._session.get("/metrics") as response:
            lines = [line.rpartition(" ") for line in (await response.text()).splitlines() if not line.startswith("#")]
        found = {}
        for name, _, value in lines:
            labels = dict(pair.split("=", 1) for pair in name.partition("{")[2].rstrip("}").split(",") if "=" in pair)
            if name.startswith("slime_router_middleware{"):
                found[f"{json.loads(labels['middleware'])}.{json.loads(labels['counter'])}"] = float(value)
            if name.startswith("slime_router_upstream_requests"):
                found[f"sent {json.loads(labels['url'])}"] = float(value)
        return found


async def require_middlewares(router, model, folder):
    """`router`: a Connection to sglang-router, with real engines behind it."""
    async with routed(router, model, folder) as front:
        await require_order_and_pace(front, folder / "recording.jsonl")
        await require_balance(front)
        await require_conversation(front)
        # No server is there, which no probe has noticed yet.
        await front.add("http://127.0.0.1:9")
        for number in range(3):
            await front.generate(f"again/{number}", "1+2=")
        counters = await front.counters()
        assert counters["retry.repeated"] == 1
        assert counters["record.recorded"] == len((folder / "recording.jsonl").read_text().splitlines())


async def require_order_and_pace(front, recording):
    """Two at a time, eight a second, which is less than the engines could; what is urgent comes last, and does not end last."""
    plain = [asyncio.ensure_future(front.generate(f"plain/{number}", "1+1=")) for number in range(10)]
    urgent = asyncio.ensure_future(front.generate("urgent/0", "1+1="))
    texts = [(await task)["text"] for task in (*plain, urgent)]
    assert len(set(texts)) == 1, "greedy responses to one question"
    lines = recording.read_text().splitlines()
    assert len(lines) == 11
    place = next(place for place, line in enumerate(lines) if "urgent/0" in line)
    assert place < 8
    counters = await front.counters()
    assert counters["rate_limit.delayed"] >= 5
    assert counters["priority.refused"] == 0


async def require_balance(front):
    """Short requests avoid the engine with a long one; with round robin they would go to both."""
    before = await front.counters()
    long = asyncio.ensure_future(front.generate("long", "1+1=", count=500))
    await asyncio.sleep(0.1)
    for number in range(4):
        await front.generate(f"short/{number}", "1+1=")
    after = await front.counters()
    assert not long.done()
    sent = sorted(after[name] - before[name] for name in before if name.startswith("sent "))
    assert sent == [1, 4]
    await long


async def require_conversation(front):
    """Its second turn has the very tokens of the first, and goes where that went."""
    first = await front.generate("turn/0", "1+1=", session="s")
    tokens = [*first["meta_info"]["prompt_token_ids"], *first["output_ids"]]
    second = await front.generate("turn/1", "1+1=" + first["text"] + "+1=", session="s")
    assert second["meta_info"]["prompt_token_ids"][: len(tokens)] == tokens
    assert second["meta_info"]["prompt_tokens"] > len(tokens)
    counters = await front.counters()
    assert (counters["session_affinity.kept"], counters["session_affinity.moved"]) == (1, 0)
    assert counters["radix_cache.known_tokens"] >= len(tokens)
