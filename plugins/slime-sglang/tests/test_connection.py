"""Errors of a server that does not respond, health checks of a paused one, and release of memory by tags."""

import asyncio
import contextlib
import socket
import threading

import aiohttp
import numpy as np
import pytest
from engine_setup import setup_for
from fake_sglang import FakeSglang

from slime_core.contracts.engine import MemoryTag
from slime_core.errors import EngineError, EngineRefused, EngineUnavailable
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_serving.connection import new_pool
from slime_sglang.connection import SglangConnection
from slime_sglang.plugin import Sglang
from slime_sglang.server_group import SglangServers


@pytest.fixture
def fake(tiny):
    servers = []

    def start(behave="well"):
        known = {"model_path": str(tiny), "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        server = FakeSglang(known, behave=behave)
        threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


async def ask(address, token="tok"):
    pool = new_pool()
    try:
        await SglangConnection(pool, f"http://{address}", token, "engine 0").get("/server_info", timeout_s=60)
    finally:
        await pool.close()


async def test_a_request_that_reached_no_server_may_be_sent_again(fake):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        # While the port is bound, no other process can listen on it.
        with pytest.raises(
            EngineUnavailable, match=rf"engine 0 \(http://{address}\): GET /server_info: no server responds there"
        ):
            await ask(address)
    with pytest.raises(EngineUnavailable, match=r"status 503: .*no room"):
        await ask(fake("is busy").address)
    with pytest.raises(EngineError, match="refuses the token") as caught:
        await ask(fake().address, token="other")
    assert not isinstance(caught.value, EngineUnavailable)


@pytest.fixture
def engine(fake, tiny, tmp_path):
    """`engine(server)`: started, on a fake server."""

    @contextlib.asynccontextmanager
    async def start(server):
        (tmp_path / "token").write_text("tok")
        config = Sglang.Config(
            external_engine_addrs=(server.address,),
            external_engine_token_file=str(tmp_path / "token"),
            health_timeout=60,
        )
        started = Sglang.build(config)
        await started.start(setup_for(tiny, tmp_path))
        try:
            yield started
        finally:
            await started.stop()

    return start


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, EngineRefused) for status in (400, 413, 422)),
        *((status, EngineUnavailable) for status in (408, 429, 503)),
        *((status, EngineError) for status in (401, 404, 500)),
    ],
)
async def test_a_refusal_is_no_death(fake, engine, status, kind):
    """A request that one server refuses, another one would refuse too; this differs from a request that it cannot serve now."""
    async with engine(fake(status)) as started:
        with pytest.raises(
            EngineError, match="refuses the token" if status == 401 else "exceeds the context"
        ) as caught:
            await started.generate([ask_for(3)])
        assert type(caught.value) is kind
        assert ("is no SGLang server" in str(caught.value)) == (status == 404)
        await started.health()


async def test_a_refused_call_is_no_refused_request(fake):
    """A server that does not take weights is not well."""
    pool = new_pool()
    try:
        server = SglangConnection(pool, f"http://{fake(400).address}", "tok", "engine 0")
        with pytest.raises(EngineError, match="status 400") as caught:
            await server.post("/update_weights_from_disk", {}, timeout_s=60)
        assert not isinstance(caught.value, EngineRefused)
    finally:
        await pool.close()


async def test_a_paused_server_is_well(fake, engine):
    """After a failed push engines are asked how they are while they are paused."""
    server = fake()
    async with engine(server) as started:
        await started.health()
        await started.pause()
        await started.health()
        await started.resume()
        server.behave = "is busy"
        with pytest.raises(EngineUnavailable):
            await started.health()


@pytest.mark.parametrize("closes", ["hangs up once", "resets once"])
async def test_a_closed_connection_is_replaced_once(fake, engine, closes):
    """A server that was idle may close one on which a request has just arrived; one that closes the next too is dead."""
    server = fake()
    async with engine(server) as started:
        for ask in (
            lambda: started.generate([ask_for(3)]),
            lambda: started.score([np.array([5, 6, 7], np.int32)], [2]),
        ):
            server.behave = closes
            (response,) = await ask()
            assert len(getattr(response, "token_ids", response)) in (2, 3)
    ids = [options["rid"] for path, options in server.requests if path == "/generate" and "rid" in options]
    assert len(ids) == len(set(ids)) == 4, "an id is not used twice"


async def test_calls_that_are_under_way(fake, engine, monkeypatch):
    """A server that is paused already is healthy; sleep continues without its caller."""
    server = fake()
    async with engine(server) as started:
        post, reached, may_end = started._fleet.post, asyncio.Event(), asyncio.Event()

        async def slow(path, body):
            found = await post(path, body)
            reached.set()
            await may_end.wait()
            return found

        monkeypatch.setattr(started._fleet, "post", slow)
        pausing = asyncio.create_task(started.pause())
        await reached.wait()
        await started.health()
        may_end.set()
        await pausing
        reached.clear()
        may_end.clear()
        sleeping = asyncio.create_task(started.sleep())
        await reached.wait()
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        may_end.set()
        await started.wake_up()
        await started.resume()
    calls = [path for path, _ in server.requests if "memory_occupation" in path or "generation" in path]
    assert calls == [
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/continue_generation",
    ]


async def test_memory_is_released_by_tags(fake, engine):
    """SGLang crashes on a tag that was not released, and on one that was released twice."""
    server = fake()
    async with engine(server) as started:
        await started.pause()
        await started.sleep([MemoryTag.KV_CACHE, MemoryTag.GRAPHS])
        await started.sleep()
        with pytest.raises(EngineError, match="require a paused engine"):
            await started.endpoints()
        await started.wake_up([MemoryTag.WEIGHTS])
        await started.wake_up([MemoryTag.WEIGHTS])
        assert len(await started.endpoints()) == 1
        with pytest.raises(EngineRefused, match="asleep"):
            await started.generate([ask_for(3)])
        await started.commit_weights(-1)
        await started.wake_up()
        await started.resume()
        assert (await started.generate([ask_for(3)]))[0].token_ids.tolist() == [3, 3, 3]
    calls = [(path, options["tags"]) for path, options in server.requests if "memory_occupation" in path]
    assert calls == [
        ("/release_memory_occupation", ["kv_cache", "cuda_graph"]),
        ("/release_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache", "cuda_graph"]),
    ]


def ask_for(count):
    sampling = SamplingParams(max_new_tokens=count)
    return GenerateRequest(request_id="r", token_ids=np.array([5], np.int32), sampling=sampling, seed=0)


async def test_external_servers_are_listed_by_place(tiny, tmp_path):
    config = Sglang.Config(external_engine_addrs=("a:1", "b:2", "c:3", "d:4"), servers=2)
    async with aiohttp.ClientSession() as pool:
        group = SglangServers(config)
        second = group.external(setup_for(tiny, tmp_path, index=7, place=1), pool)
        assert [server.address for server in second] == ["http://c:3", "http://d:4"]
        with pytest.raises(EngineError, match=r"names 4 servers, but 3 engines of 2 need 6"):
            group.external(setup_for(tiny, tmp_path, index=7, place=2), pool)
