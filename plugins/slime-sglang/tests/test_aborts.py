"""Aborts by id, and what they must leave alone, on a server whose abort takes its time on the way."""

import asyncio

import pytest
from engine_setup import requests_of, short_request

from slime_core.errors import EngineError
from slime_core.types.completion import FinishReason
from slime_plugin_kit.fast_clock import run_fast
from slime_sglang.config import SglangOptions
from slime_sglang.connection import SglangConnection
from slime_sglang.server_group import SglangServers

CALL_S = 0.01


class Server:
    """Responses a request when it is aborted."""

    name = "server"
    dialect = SglangConnection.dialect

    def __init__(self):
        self.sent = []
        self.running = {}

    async def post(self, path, body, **how):
        rid = body["rid"]
        self.sent.append(rid.split("#")[0])
        self.running[rid] = asyncio.get_running_loop().create_future()
        await self.running[rid]
        meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [], "weight_version": "0"}
        return {"meta_info": meta}

    def abort(self, body):
        for rid in list(self.running):
            if body.get("abort_all") or rid == body["rid"]:
                self.running.pop(rid).set_result(None)


class OneServer(SglangServers):
    """The real one's aborts, with a server of its own."""

    def __init__(self):
        super().__init__(SglangOptions())
        self.servers = [Server()]

    async def post_to(self, server, path, body):
        await asyncio.sleep(CALL_S)
        server.abort(body)
        await asyncio.sleep(CALL_S)


def start(in_flight, name):
    (task,) = in_flight.enter([short_request(name)])
    return task


def test_a_paused_server_is_not_asked_without_end():
    """It keeps its requests until it is resumed, as with `pause_mode = "in_place"`."""

    async def scene():
        fleet = OneServer()
        in_flight = requests_of(fleet)
        server, calls = fleet.servers[0], []
        task = start(in_flight, "kept")
        await asyncio.sleep(0.01)
        server.abort, abort = calls.append, server.abort
        in_flight.hold()
        aborting = asyncio.create_task(in_flight.abort(["kept"]))
        await asyncio.sleep(2)
        assert 2 <= len(calls) < 12
        server.abort = abort
        in_flight.resume()
        await aborting
        assert (await task).finish_reason is FinishReason.ABORT

    run_fast(scene())


@pytest.mark.parametrize("aborted_first", [False, True])
def test_a_request_that_a_pause_keeps_is_not_late(aborted_first):
    """The limit, of 10 s, begins when the pause ends: a server that still keeps it then counts as hung."""

    async def scene():
        fleet = OneServer()
        in_flight = requests_of(fleet)
        server, calls = fleet.servers[0], []
        kept = start(in_flight, "kept")
        await asyncio.sleep(0.01)
        server.abort = calls.append
        if not aborted_first:
            in_flight.hold()
        aborting = asyncio.create_task(in_flight.abort(["kept"]))
        await asyncio.sleep(2)
        in_flight.hold()
        await asyncio.sleep(7)
        in_flight.resume()
        await asyncio.sleep(7)
        assert not aborting.done()
        with pytest.raises(EngineError, match="1 aborted requests have not ended in time"):
            await asyncio.wait_for(aborting, 10)
        await in_flight.leave([kept])

    run_fast(scene())


def test_a_request_that_a_long_pause_keeps_ends_without_the_server():
    """A run that fails while its engines are paused aborts what is left, and resumes nothing."""

    async def scene():
        fleet = OneServer()
        in_flight = requests_of(fleet)
        kept = start(in_flight, "kept")
        await asyncio.sleep(0.01)
        fleet.servers[0].abort = [].append
        in_flight.hold()
        await asyncio.wait_for(in_flight.abort(["kept"]), 30)
        assert (await kept).finish_reason is FinishReason.ABORT
        assert not len(in_flight)

    run_fast(scene())


def test_a_request_sent_during_an_abort_of_all_continues():
    """The only request is ended by aborting all, which reaches the server after the next request."""

    async def scene():
        in_flight = requests_of(OneServer())
        server = in_flight._fleet.servers[0]
        expected = start(in_flight, "wanted")
        await asyncio.sleep(0)
        abort = asyncio.create_task(in_flight.abort(["wanted"]))
        await asyncio.sleep(CALL_S / 2)
        other = start(in_flight, "other")
        await abort
        assert (await expected).finish_reason is FinishReason.ABORT
        await asyncio.sleep(CALL_S)
        assert server.sent == ["wanted", "other", "other"]
        # A request sent after the abort-all is ended by an outside abort; one sent before it returned is sent again.
        for _ in range(2):
            assert not other.done()
            server.abort({"abort_all": True})
            await asyncio.sleep(CALL_S)
        assert (await asyncio.wait_for(other, 1)).finish_reason is FinishReason.ABORT
        assert len(server.sent) == 4

    run_fast(scene())
