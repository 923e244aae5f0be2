"""What is left on an engine's servers of an adapter that one of them refuses, or does not forget."""

from types import SimpleNamespace

import pytest
from vllm_setup import setup_for

from slime_core.errors import EngineError
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_serving.adapter_options import AdapterOptions
from slime_serving.server_group import ServerGroup
from slime_vllm.adapter import LOAD, UNLOAD
from slime_vllm.served_adapters import VllmAdapters


class Fleet:
    """Two servers: each has names, and their workers have numbers."""

    on_each = ServerGroup.on_each

    def __init__(self):
        self.servers = [SimpleNamespace(address=name, names=set(), numbers=set()) for name in "ab"]
        self.fails = set()
        """(server, what it does not respond to)"""

    async def post_to(self, server, path, body):
        call = body.get("method", path)
        if (server.address, call) in self.fails:
            raise EngineError(f"{server.address}: {call}")
        if path == LOAD:
            server.names.add(body["lora_name"])
            server.numbers.add(1)
        elif path == UNLOAD:
            # As vLLM, which responds 404.
            if body["lora_name"] not in server.names:
                raise EngineError(f"{server.address} does not have it")
            server.names.discard(body["lora_name"])
        elif call == "newest_adapter":
            return {"results": [1]}
        else:
            server.numbers.discard(*body["args"])
        return None

    def held(self):
        return [(server.names, server.numbers) for server in self.servers]


@pytest.fixture
def fleet():
    return Fleet()


@pytest.fixture
def adapters(fleet, tmp_path):
    setup = setup_for(make_tiny_model(tmp_path / "model"), tmp_path)
    return VllmAdapters(fleet, AdapterOptions(max_adapters=2), tmp_path / "adapters", setup)


@pytest.mark.parametrize("call", [UNLOAD, "remove_lora"])
async def test_a_server_that_does_not_forget_is_asked_again(adapters, fleet, tmp_path, call):
    await adapters.send("x", tmp_path)
    fleet.fails = {("a", call)}
    with pytest.raises(EngineError, match=f"a: {call}"):
        await adapters.forget("x")
    fleet.fails.clear()
    await adapters.forget("x")
    assert fleet.held() == [(set(), set())] * 2


async def test_the_error_of_a_load_comes_before_that_of_freeing_it(adapters, fleet, tmp_path):
    """vLLM ignores tensors that belong to no layer; then its newest adapter is none, or has less."""
    fleet.fails = {("a", "newest_adapter"), ("a", UNLOAD)}
    with pytest.raises(EngineError, match="a: newest_adapter"):
        await adapters.send("x", tmp_path)
    fleet.fails.clear()
    await adapters.forget("x")
    assert [server.names for server in fleet.servers] == [set(), set()]
