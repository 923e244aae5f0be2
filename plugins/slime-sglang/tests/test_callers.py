"""Calls to a server that are made where a request comes from."""

import asyncio
import pickle
import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from engine_setup import requests_of, short_request
from fake_sglang import FakeSglang

from slime_core.contracts.engine import CallerLost
from slime_core.errors import EngineRefused
from slime_core.types.completion import FinishReason
from slime_serving.calls import HttpCaller
from slime_serving.connection import new_pool
from slime_serving.running import TokenRows
from slime_sglang.config import SglangOptions
from slime_sglang.connection import SglangConnection
from slime_sglang.plugin import Sglang
from slime_sglang.server_group import SglangServers


class Elsewhere:
    """A caller as in another process: what passes to it and back is pickled."""

    def __init__(self):
        self.made = Sglang.build_caller(SglangOptions(), max_calls=4)
        self.replies = []

    async def call(self, asked):
        reply = await self.made.call(pickle.loads(pickle.dumps(asked)))  # noqa: S301 - made here
        self.replies.append(pickle.loads(pickle.dumps(reply)))  # noqa: S301 - made here
        return self.replies[-1]


class Lost:
    async def call(self, asked):
        raise CallerLost("rollout worker 0 has died")


@contextmanager
def serving(behave="well"):
    server = FakeSglang({"weight_version": "0"}, behave=behave)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


async def completed(server, caller):
    """The completion of a request of an engine with this server."""
    fleet = SglangServers(SglangOptions())
    pool = new_pool()
    fleet.servers = [SglangConnection(pool, f"http://{server.address}", server.token, "engine 0")]
    try:
        (task,) = requests_of(fleet).enter([replace(short_request("a"), caller=caller)])
        return await task
    finally:
        await pool.close()


async def test_a_call_is_made_by_the_caller():
    caller = Elsewhere()
    assert isinstance(caller.made, HttpCaller)
    with serving() as server:
        expected, found = await completed(server, None), await completed(server, caller)
        assert [path for path, _ in server.requests] == ["/generate"] * 2
    await caller.made.close()
    (reply,) = caller.replies
    # Arrays, and nothing that is not read.
    assert isinstance(reply["meta_info"]["output_token_logprobs"], TokenRows)
    assert list(reply) == ["meta_info"]
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.log_probs, expected.log_probs)
    assert (found.token_ids.dtype, found.log_probs.dtype) == (np.int32, np.float32)
    assert found.spans == expected.spans
    assert len(found.token_ids) > 0


async def test_an_error_has_its_class():
    caller = Elsewhere()
    with serving(behave=400) as server, pytest.raises(EngineRefused, match="exceeds the context"):
        await completed(server, caller)
    await caller.made.close()


async def test_a_request_whose_caller_is_lost_is_aborted():
    with serving() as server:
        completion = await asyncio.wait_for(completed(server, Lost()), 10)
    assert completion.finish_reason is FinishReason.ABORT
    assert not server.requests
