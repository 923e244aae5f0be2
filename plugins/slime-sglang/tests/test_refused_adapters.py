"""What is left on an engine's servers of an adapter that one of them refuses, or does not forget; layers that none takes."""

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

    silent = refuses = None
    """The server that does not respond when it is to forget one, and the one that does not have it."""

    def __init__(self):
        self.servers = [SimpleNamespace(name="a", held=set()), SimpleNamespace(name="b", held=set())]

    async def post_to(self, server, path, body):
        if path == LOAD:
            if server.name == "a" and body["lora_name"] == "x":
                return {"success": False, "error_message": "no room"}
            await asyncio.sleep(0.01)
            server.held.add(body["lora_name"])
        elif server.name == self.silent:
            raise EngineError(f"{server.name} does not respond")
        elif server.name == self.refuses:
            raise EngineError(f"{server.name} does not have {body['lora_name']}")
        else:
            await asyncio.sleep(0.01)
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


async def test_one_server_that_does_not_respond_keeps_no_other_from_forgetting(tmp_path):
    setup = setup_for(make_tiny_model(tmp_path / "model"), tmp_path, device="cuda")
    fleet = Fleet()
    adapters = SglangAdapters(fleet, AdapterOptions(max_adapters=2), tmp_path / "adapters", setup)
    await adapters.send("y", tmp_path)
    fleet.silent = "a"
    with pytest.raises(EngineError, match="a does not respond"):
        await adapters.forget("y")
    assert [server.held for server in fleet.servers] == [{"y"}, set()]
    # It is asked once more, and the other one is not: it refuses what it does not have.
    fleet.silent, fleet.refuses = None, "b"
    await adapters.forget("y")
    assert [server.held for server in fleet.servers] == [set(), set()]


@pytest.mark.parametrize("layer", ["mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_qkv"])
def test_layers_that_sglang_adapts_not_are_named(layer, tmp_path):
    setup = setup_for(make_tiny_model(tmp_path / "model"), tmp_path, device="cuda")
    adapters = SglangAdapters(Fleet(), AdapterOptions(max_adapters=2), tmp_path / "adapters", setup)
    assert adapters.problem_of_layers(["model.layers.0.self_attn.q_proj"]) is None
    problem = adapters.problem_of_layers(["model.layers.0.self_attn.q_proj", f"model.layers.0.{layer}"])
    assert problem.startswith(
        f"it adapts model.layers.0.{layer}, and SGLang applies adapters to layers with these names alone"
    )
