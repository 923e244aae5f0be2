"""What servers hold, as far as it is decided before they start: weights by their files, keys and values by the share of the
device that SGLang is told."""

import json

import pytest
from engine_setup import setup_for

from slime_plugin_kit.tiny_model import load_plain, make_tiny_model
from slime_sglang.plugin import Sglang
from slime_sglang.transports.config import DeltaConfig, DistributedConfig, IpcConfig
from slime_sglang.transports.plugin import Delta, Distributed, Ipc
from slime_training.memory_plan import EngineLoad, Moment, bytes_at

pytestmark = pytest.mark.sglang

DEVICE = 10**6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def parameters(model):
    return sum(parameter.numel() for parameter in load_plain(model).parameters())


def told(model, *, device_bytes=DEVICE, options=None, **more):
    setup = setup_for(model, model.parent, **({"device": "cuda"} | more))
    config = Sglang.Config(**(options or {}))
    return Sglang.memory(config, EngineLoad(setup=setup, device_bytes=device_bytes))


def of(memory, component):
    (line,) = (line for line in memory.lines if line.component == component and line.place == "device")
    return line.num_bytes


def test_keys_and_values_get_what_the_weights_leave(model, parameters):
    memory = told(model, options={"mem_fraction_static": 0.5})
    left = DEVICE // 2 - 2 * parameters
    assert of(memory, "weights") == 2 * parameters
    assert of(memory, "keys and values") == left
    sizes = json.loads((model / "config.json").read_text())
    token = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * 2
    assert memory.kv_tokens == left // token


@pytest.mark.parametrize(("devices", "shared"), [(2, 2), (4, 2)])
def test_ranks_share_weights_and_as_many_heads_as_there_are(devices, shared, model, parameters):
    alone = told(model, options={"mem_fraction_static": 0.5})
    memory = told(model, options={"mem_fraction_static": 0.5}, num_devices=devices)
    assert of(memory, "weights") == 2 * parameters // devices
    # Two key-value heads: each of four ranks holds one of them.
    per_byte = memory.kv_tokens / of(memory, "keys and values")
    assert per_byte == pytest.approx(shared * alone.kv_tokens / of(alone, "keys and values"), rel=0.01)


def test_several_servers_of_an_engine_hold_a_model_each(model, parameters):
    memory = told(model, options={"mem_fraction_static": 0.5, "servers": 2}, num_devices=2)
    assert of(memory, "weights") == 2 * parameters
    assert memory.kv_tokens == 2 * told(model, options={"mem_fraction_static": 0.5}).kv_tokens


@pytest.mark.parametrize(
    ("options", "device_bytes", "says"),
    [({}, DEVICE, "SGLang chooses mem_fraction_static"), ({"mem_fraction_static": 0.5}, None, "--device-memory 80GiB")],
)
def test_what_is_not_decided_is_not_told(options, device_bytes, says, model):
    memory = told(model, options=options, device_bytes=device_bytes)
    assert memory.kv_tokens is None
    assert says in memory.untold[0]
    assert [line.component for line in memory.lines] == ["weights"]


@pytest.mark.parametrize("options", [{"external_engine_addrs": ("127.0.0.1:1",)}, {"quantization": "fp8"}])
def test_servers_of_others_and_quantised_weights_are_not_told(options, model):
    assert told(model, options=options) is None


def test_on_a_cpu_it_holds_the_tokens_in_flight(model, parameters):
    memory = told(model, device="cpu", device_bytes=None, max_context_len=1000, max_batch=30)
    assert of(memory, "weights") == 4 * parameters
    assert memory.kv_tokens == 30_000


def test_what_it_gives_back(model):
    memory = told(model, options={"mem_fraction_static": 0.5}, offload=True)
    assert bytes_at(memory.lines, Moment.ASLEEP) == 0
    assert bytes_at(memory.lines, Moment.SYNC) == of(memory, "weights")
    assert bytes_at(memory.lines, Moment.ASLEEP, "host") == of(memory, "weights")


@pytest.mark.parametrize(("transport", "config"), [(Ipc, IpcConfig), (Distributed, DistributedConfig)])
def test_two_buckets_on_either_side(transport, config, model):
    told = transport.memory(config(update_weight_buffer_size=100), 1000)
    assert [line.num_bytes for line in (*told.trainer, *told.engine)] == [200, 200]
    assert [line.num_bytes for line in transport.memory(config(update_weight_buffer_size=900), 1000).trainer] == [1000]


def test_files_are_not_told():
    assert Delta.memory(DeltaConfig(), 1000) is None
