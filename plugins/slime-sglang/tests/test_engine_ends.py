"""Errors when a server ends, and what is released: new requests, connections, memory that is still read."""

import asyncio
import base64
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
from engine_setup import requests_of, setup_for, short_request
from fake_sglang import FakeSglang

from slime_core.errors import EngineError
from slime_plugin_kit.fast_clock import run_fast
from slime_plugin_kit.tiny_model import buckets_of, load_plain, named_weights
from slime_serving.connection import new_pool
from slime_serving.server_process import ServerProcess
from slime_sglang.connection import SglangConnection
from slime_sglang.log_format import SGLANG_LOG
from slime_sglang.plugin import Sglang
from slime_sglang.server_group import SglangServers


class Silent:
    """A group with one server that does not respond."""

    routed = False
    name = "server"
    dialect = SglangConnection.dialect

    def __init__(self):
        self.servers = [self]

    def at(self, place):
        return self

    def headers(self, session):
        return None

    async def post(self, path, body, **how):
        await asyncio.Event().wait()


def test_a_new_request_ends_with_the_engines_failure():
    """And not as one whose caller went away: it is sent to another engine."""

    async def scene():
        in_flight = requests_of(Silent())
        tasks = in_flight.enter([short_request("early")])
        await asyncio.sleep(1)
        tasks += in_flight.enter([short_request("late")])
        in_flight.fail(EngineError("engine 0: its process was killed"))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(end) for end in ends] == ["engine 0: its process was killed"] * 2
        assert len(in_flight) == 0

    run_fast(scene())


def test_a_request_that_is_left_before_it_began_does_not_run():
    async def scene():
        in_flight = requests_of(Silent())
        await in_flight.leave(in_flight.enter([short_request("left")]))
        assert len(in_flight) == 0
        await in_flight.abort()

    run_fast(scene())


class Process:
    """For an external server."""

    pid = 0
    exit_code = None
    start_seconds: ClassVar[dict[str, float]] = {}

    async def stop(self):
        pass


class Stubborn(Process):
    async def stop(self):
        await asyncio.Event().wait()


async def test_connections_are_closed_if_stop_is_cancelled():
    fleet = SglangServers(Sglang.Config())
    pool = fleet._pool = new_pool()
    fleet._processes = [Stubborn()]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await fleet.stop()
    assert pool.closed


async def test_what_a_stop_has_left_is_not_reported_as_ended():
    """An engine that replaces this one would start beside it."""

    class Left(Process):
        stops = 0

        async def stop(self):
            self.stops += 1
            if self.stops < 3:
                raise EngineError("process group 7 has not ended")

    fleet, left = SglangServers(Sglang.Config()), Left()
    fleet._processes = [Process(), left]
    for _ in range(2):
        with pytest.raises(EngineError, match="process group 7"):
            await fleet.stop()
    for _ in range(2):
        await fleet.stop()
    assert left.stops == 3


async def test_a_death_is_reported_even_without_a_log(tmp_path):
    process = ServerProcess("this", {}, log=tmp_path / "logs" / "server.log", form=SGLANG_LOG, environment={})
    process._process.wait(60)
    process.log.unlink()
    fleet = SglangServers(Sglang.Config())
    fleet._processes = [process]
    message = asyncio.get_running_loop().create_future()
    fleet.watch(message.set_result)
    assert f"its process {process.pid} ended with exit code 0" in str(await asyncio.wait_for(message, 20))
    await fleet.stop()


@pytest.mark.parametrize("stages", [1, 2])
async def test_memory_is_shared_with_a_server_of_one_stage(stages, tiny, tmp_path, monkeypatch):
    """One of several responses when its first stage has read a bucket, and the others read on."""
    known = {"model_path": str(tiny), "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    server = FakeSglang(known)
    server.server_info = {"version": "0.0", "tp_size": 1, "pp_size": stages}
    threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()

    async def found(config, setup, place, pool, **more):
        connection = SglangConnection(pool, f"http://{server.address}", "tok", "engine 0")
        return SimpleNamespace(connection=connection, bootstrap_port=None, process=Process())

    monkeypatch.setattr("slime_sglang.server_group.start_server", found)
    engine = Sglang.build(Sglang.Config())
    try:
        await engine.start(setup_for(tiny, tmp_path, num_devices=stages))
        await engine.pause()
        for bucket in buckets_of(named_weights(load_plain(tiny)), 0, 1):
            await engine.load_bucket(bucket)
    finally:
        await engine.stop()
        server.shutdown()
        server.server_close()
    sent = [options for path, options in server.requests if path == "/update_weights_from_tensor"]
    payloads = [base64.b64decode(options["serialized_named_tensors"][0]) for options in sent]
    assert payloads
    assert [b"/proc/" in payload for payload in payloads] == [stages == 1] * len(payloads)
