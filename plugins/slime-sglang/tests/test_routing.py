"""The real sglang-router in front of servers that hold no model: sessions, and pairs of prefilling and decoding servers."""

import asyncio
import json
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine_setup import setup_for

from slime_core.errors import EngineError
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_plugin_kit.listening_sockets import listening_sockets
from slime_sglang import launching
from slime_sglang.plugin import Sglang

pytestmark = pytest.mark.sglang


@pytest.fixture
def engine(tiny, tmp_path, monkeypatch):
    """`engine(**options)`: not started, with three servers behind a router."""
    monkeypatch.setattr(launching, "MODULE", "fake_sglang")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def build(**options):
        return Sglang.build(Sglang.Config(servers=3, start_timeout=120, **options))

    return build


def request(number, session=None):
    return GenerateRequest(
        request_id=f"r/{number}",
        token_ids=np.array([5, 6], np.int32),
        sampling=SamplingParams(max_new_tokens=3),
        seed=number,
        session_id=session,
    )


async def until_unwell(engine):
    """Raises the error of its health check."""
    async with asyncio.timeout(60):
        while True:
            await engine.health()
            await asyncio.sleep(0.05)


def served(tmp_path):
    """The requests of each server, after the engine's own ones at the start."""
    logs = [tmp_path / "logs" / f"sglang-0-{place}.log" for place in range(3)]
    return [
        [json.loads(line.split(" ", 1)[1]) for line in log.read_text().splitlines() if line.startswith("generate ")]
        for log in logs
    ]


async def test_a_session_stays_on_its_server(engine, tiny, tmp_path):
    """sglang-router hashes the header that carries the session."""
    under_test = engine(router_policy="consistent_hashing")
    await under_test.start(setup_for(tiny, tmp_path, num_devices=3))
    try:
        before = [len(found) for found in served(tmp_path)]
        await under_test.generate([request(number, f"conversation-{number % 4}") for number in range(32)])
        counts = [len(found) - start for found, start in zip(served(tmp_path), before, strict=True)]
        sockets = listening_sockets()
    finally:
        await under_test.stop()
    # The router's and its metrics', and each server's.
    assert len(sockets) >= 5
    assert [str(own) for own in sockets if not own.is_loopback] == []
    # Four sessions of eight requests each: wherever they are, they are there together.
    assert sum(counts) == 32
    assert all(count % 8 == 0 for count in counts)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_router_that_dies_or_hangs_makes_the_engine_unhealthy(engine, tiny, tmp_path, fault):
    """Though its servers respond: their requests would wait for the router. So the engine is replaced, with its router."""
    under_test = engine(router_policy="round_robin", health_timeout=5.0)
    await under_test.start(setup_for(tiny, tmp_path, num_devices=3))
    try:
        await under_test.health()
        router = under_test._fleet.router
        os.kill(router.process.pid, fault)
        with pytest.raises(EngineError) as raised:
            await until_unwell(under_test)
        if fault is signal.SIGKILL:
            assert f"its process {router.process.pid} was killed by SIGKILL" in str(raised.value)
        else:
            assert psutil.Process(router.process.pid).status() == psutil.STATUS_STOPPED
            assert "engine 0, router" in str(raised.value)
            assert "5 s" in str(raised.value)
    finally:
        await under_test.stop()
    assert not psutil.pid_exists(router.process.pid)


async def test_prefill_and_decode_are_paired(engine, tiny, tmp_path):
    """Every request goes to the prefill server and to one decode server, with the same room, and to no other server."""
    under_test = engine(router_policy="round_robin", prefill_servers=1)
    await under_test.start(setup_for(tiny, tmp_path, num_devices=3))
    try:
        started_with = [
            json.loads(
                (tmp_path / "logs" / f"sglang-0-{place}.log").read_text().split("options ", 1)[1].splitlines()[0]
            )
            for place in range(3)
        ]
        assert [options["disaggregation_mode"] for options in started_with] == ["prefill", "decode", "decode"]
        port = started_with[0]["disaggregation_bootstrap_port"]
        assert [options["disaggregation_bootstrap_port"] for options in started_with] == [port, None, None]
        responses = await under_test.generate([request(number) for number in range(8)])
        assert [len(response.token_ids) for response in responses] == [3] * 8
        prefill, *decode = served(tmp_path)
        assert {asked["bootstrap_port"] for asked in prefill} == {port}
        rooms = sorted(asked["bootstrap_room"] for asked in prefill)
        assert len(set(rooms)) == 8
        assert sorted(asked["bootstrap_room"] for found in decode for asked in found) == rooms
        assert all(decode)
        # Weights go to all of them.
        await under_test.pause()
        assert len(await under_test.endpoints()) == 3
    finally:
        await under_test.stop()
