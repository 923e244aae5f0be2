"""What is said of a server that does not answer, and how a paused one is asked how it is."""

import socket
import threading

import pytest
from engine_setup import setup_for
from fake_sglang import FakeSglang

from slime_core.errors import EngineError, EngineUnavailable
from slime_sglang.connection import Connection, new_pool
from slime_sglang.plugin import Sglang


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
        await Connection(pool, f"http://{address}", token, "engine 0").get("/server_info", timeout_s=5)
    finally:
        await pool.close()


async def test_what_reached_nobody_may_be_sent_again(fake):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(
        EngineUnavailable, match=rf"engine 0 \(http://{address}\): GET /server_info: nobody answers there"
    ):
        await ask(address)
    with pytest.raises(EngineUnavailable, match=r"status 503: .*no room"):
        await ask(fake("is busy").address)
    with pytest.raises(EngineError, match="refuses the token") as caught:
        await ask(fake().address, token="other")
    assert not isinstance(caught.value, EngineUnavailable)


async def test_a_paused_server_is_well(fake, tiny, tmp_path):
    """After a failed push engines are asked how they are while they are paused."""
    server = fake()
    (tmp_path / "token").write_text("tok")
    config = Sglang.Config(
        external_engine_addrs=(server.address,), external_engine_token_file=str(tmp_path / "token"), health_timeout=5
    )
    engine = Sglang.build(config)
    await engine.start(setup_for(tiny, tmp_path))
    try:
        await engine.health()
        await engine.pause()
        await engine.health()
        await engine.resume()
        server.behave = "is busy"
        with pytest.raises(EngineUnavailable):
            await engine.health()
    finally:
        await engine.stop()
