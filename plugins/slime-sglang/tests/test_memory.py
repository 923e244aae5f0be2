"""Estimated memory of servers before their start: weights by their files, keys and values by the share of the device that
is set for SGLang."""

import json

import pytest
from engine_setup import setup_for

from slime_plugin_kit.tiny_model import load_plain, make_tiny_model
from slime_sglang.plugin import Sglang
from slime_training.memory_plan import EngineLoad, MemoryPhase, bytes_at
from slime_transports.config import DeltaConfig, DistributedConfig, IpcConfig
from slime_transports.plugin import Delta, Distributed, Ipc

pytestmark = pytest.mark.sglang

DEVICE = 10**6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def parameters(model):
    return sum(parameter.numel() for parameter in load_plain(model).parameters())


def memory_of(model, *, device_bytes=DEVICE, options=None, **more):
    setup = setup_for(model, model.parent, **({"device": "cuda"} | more))
    config = Sglang.Config(**(options or {}))
    return Sglang.memory(config, EngineLoad(setup=setup, device_bytes=device_bytes))


def of(memory, component):
    (line,) = (line for line in memory.lines if line.component == component and line.place == "device")
    return line.num_bytes


def test_the_kv_cache_gets_the_memory_that_weights_leave(model, parameters):
    memory = memory_of(model, options={"mem_fraction_static": 0.5})
    left = DEVICE // 2 - 2 * parameters
    assert of(memory, "weights") == 2 * parameters
    assert of(memory, "keys and values") == left
    sizes = json.loads((model / "config.json").read_text())
    token = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * 2
    assert memory.kv_tokens == left // token


@pytest.mark.parametrize(("devices", "shared"), [(2, 2), (4, 2)])
def test_ranks_shard_weights_and_up_to_all_heads(devices, shared, model, parameters):
    alone = memory_of(model, options={"mem_fraction_static": 0.5})
    memory = memory_of(model, options={"mem_fraction_static": 0.5}, num_devices=devices)
    assert of(memory, "weights") == 2 * parameters // devices
    # Two key-value heads: each of four ranks holds one of them.
    per_byte = memory.kv_tokens / of(memory, "keys and values")
    assert per_byte == pytest.approx(shared * alone.kv_tokens / of(alone, "keys and values"), rel=0.01)


def test_several_servers_of_an_engine_hold_a_model_each(model, parameters):
    memory = memory_of(model, options={"mem_fraction_static": 0.5, "servers": 2}, num_devices=2)
    assert of(memory, "weights") == 2 * parameters
    assert memory.kv_tokens == 2 * memory_of(model, options={"mem_fraction_static": 0.5}).kv_tokens


@pytest.mark.parametrize(
    ("options", "device_bytes", "reason"),
    [({}, DEVICE, "SGLang chooses mem_fraction_static"), ({"mem_fraction_static": 0.5}, None, "--device-memory 80GiB")],
)
def test_undecided_memory_is_listed_as_not_estimated(options, device_bytes, reason, model):
    memory = memory_of(model, options=options, device_bytes=device_bytes)
    assert memory.kv_tokens is None
    assert reason in memory.not_estimated[0]
    assert [line.component for line in memory.lines] == ["weights"]


@pytest.mark.parametrize("options", [{"external_engine_addrs": ("127.0.0.1:1",)}, {"quantization": "fp8"}])
def test_external_servers_and_quantized_weights_are_not_estimated(options, model):
    assert memory_of(model, options=options) is None


def test_on_a_cpu_it_holds_the_tokens_in_flight(model, parameters):
    memory = memory_of(model, device="cpu", device_bytes=None, max_context_len=1000, max_batch=30)
    assert of(memory, "weights") == 4 * parameters
    assert memory.kv_tokens == 30_000


def test_offloaded_memory_is_on_the_host(model):
    memory = memory_of(model, options={"mem_fraction_static": 0.5}, offload=True)
    assert bytes_at(memory.lines, MemoryPhase.ASLEEP) == 0
    assert bytes_at(memory.lines, MemoryPhase.SYNC) == of(memory, "weights")
    assert bytes_at(memory.lines, MemoryPhase.ASLEEP, "host") == of(memory, "weights")


@pytest.mark.parametrize(("transport", "config"), [(Ipc, IpcConfig), (Distributed, DistributedConfig)])
def test_two_buckets_on_either_side(transport, config, model):
    memory = transport.memory(config(update_weight_buffer_size=100), 1000)
    assert [line.num_bytes for line in (*memory.trainer, *memory.engine)] == [200, 200]
    assert [line.num_bytes for line in transport.memory(config(update_weight_buffer_size=900), 1000).trainer] == [1000]


def test_transports_by_files_are_not_estimated():
    assert Delta.memory(DeltaConfig(), 1000) is None
