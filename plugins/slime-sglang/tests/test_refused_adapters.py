"""An adapter that one of an engine's servers refuses is left on none of them."""

import asyncio
from types import SimpleNamespace

import pytest
from engine_setup import setup_for

from slime_core.errors import EngineError
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_serving.adapter_options import AdapterOptions
from slime_serving.server_group import ServerGroup
from slime_sglang.served_adapters import LOAD, SglangAdapters


class Fleet:
    """Two servers: one refuses at once, the other has loaded the adapter a moment later."""

    on_each = ServerGroup.on_each

    def __init__(self):
        self.servers = [SimpleNamespace(name="a", held=set()), SimpleNamespace(name="b", held=set())]

    async def post_to(self, server, path, body):
        if path == LOAD:
            if server.name == "a":
                return {"success": False, "error_message": "no room"}
            await asyncio.sleep(0.01)
            server.held.add(body["lora_name"])
        else:
            server.held.discard(body["lora_name"])
        return {"success": True}


async def test_a_slower_server_forgets_it_too(tmp_path):
    setup = setup_for(make_tiny_model(tmp_path / "model"), tmp_path, device="cuda")
    fleet = Fleet()
    adapters = SglangAdapters(fleet, AdapterOptions(max_adapters=2), tmp_path / "adapters", setup)
    with pytest.raises(EngineError, match="a: /load_lora_adapter: no room"):
        await adapters.send("x", tmp_path)
    await adapters.forget("x")
    await asyncio.sleep(0.05)
    assert [server.held for server in fleet.servers] == [set(), set()]
