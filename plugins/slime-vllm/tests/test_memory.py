"""Estimated memory of servers before their start: weights by their files, keys and values by the share of the device, adapters
by the matrices that vLLM allocates for them."""

import json

import pytest
from carried_run import write_run
from vllm_setup import PYTHON, setup_for

from slime_core.cli.invocation import bind_invocation, parse_words
from slime_plugin_kit.tiny_model import load_plain, make_tiny_model
from slime_preflight.tenants import Target, policy_engines
from slime_training.memory_plan import EngineLoad, MemoryPhase, bytes_at
from slime_vllm.plugin import Vllm

DEVICE = 10**7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def parameters(model):
    return sum(parameter.numel() for parameter in load_plain(model).parameters())


def memory_of(model, *, device_bytes=DEVICE, options=None, **more):
    setup = setup_for(model, model.parent, **({"device": "cuda"} | more))
    return Vllm.memory(Vllm.Config(**(options or {})), EngineLoad(setup=setup, device_bytes=device_bytes))


def of(memory, component):
    return sum(line.num_bytes for line in memory.lines if line.component == component and line.place == "device")


def token_of(model):
    sizes = json.loads((model / "config.json").read_text())
    return 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * 2


@pytest.mark.parametrize(
    ("options", "share"), [({}, 0.92), ({"gpu_memory_utilization": 0.5}, 0.5)], ids=["vLLM's share", "given"]
)
def test_keys_and_values_get_what_weights_leave(options, share, model, parameters):
    memory = memory_of(model, options=options)
    assert of(memory, "weights") == 2 * parameters
    assert of(memory, "keys and values") == int(share * DEVICE) - 2 * parameters
    assert memory.kv_tokens == of(memory, "keys and values") // token_of(model)


def test_replicas_hold_a_model_each_and_ranks_a_part(model, parameters):
    given = {"kv_cache_memory_bytes": 10**6}
    alone = memory_of(model, options=given)
    replicas = memory_of(model, options=given | {"data_parallel_size": 2}, num_devices=2)
    assert (of(replicas, "weights"), replicas.kv_tokens) == (2 * parameters, 2 * alone.kv_tokens)
    # Two key-value heads: each of four ranks holds one of them.
    ranks = memory_of(model, options=given, num_devices=4)
    assert of(ranks, "weights") == 2 * parameters // 4
    assert ranks.kv_tokens == pytest.approx(2 * alone.kv_tokens, abs=1)


def test_an_adapter_takes_its_place_before_keys_and_values(model):
    """By layer, A and B: of a rank of two, for rank 4, which vLLM makes 8, in bfloat16."""
    memory = memory_of(model, adapter_rank=4, num_devices=2)
    sizes = json.loads((model / "config.json").read_text())
    assert (sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"]) == (32, 4, 2)
    assert (sizes["head_dim"], sizes["intermediate_size"], sizes["num_hidden_layers"]) == (8, 48, 2)
    layer = [3 * 32, 16 + 8 + 8, 16, 32, 2 * 32, 24 + 24, 24, 32]
    ends = [sizes["vocab_size"], 32, 32, sizes["vocab_size"]]
    assert of(memory, "adapter") == 2 * 8 * (2 * sum(layer) + sum(ends))
    whole = int(0.92 * DEVICE)
    assert of(memory, "weights") + of(memory, "adapter") + of(memory, "keys and values") == whole
    assert of(memory_of(model), "adapter") == 0
    several = memory_of(model, options={"max_adapters": 3, "max_adapter_rank": 4, "adapters_at_once": 2}, num_devices=2)
    assert of(several, "adapter") == 2 * of(memory, "adapter")


def test_memory_is_given_back_by_the_level(model):
    lent = {"offload": True, "transport": "ipc"}
    memory = memory_of(model, **lent)
    assert bytes_at(memory.lines, MemoryPhase.ASLEEP) == 0
    assert bytes_at(memory.lines, MemoryPhase.SYNC) == of(memory, "weights")
    assert bytes_at(memory.lines, MemoryPhase.ASLEEP, "host") == of(memory, "weights")
    dropped = memory_of(model, options={"sleep_level": 2}, **lent)
    assert bytes_at(dropped.lines, MemoryPhase.ASLEEP, "host") == 0


def test_what_is_not_known_is_listed(model):
    assert "--device-memory 80GiB" in memory_of(model, device_bytes=None).not_estimated[0]
    assert memory_of(model, options={"spec_method": "ngram"}).not_estimated == (
        "drafts: their weights, keys and values",
    )
    assert memory_of(model, options={"quantization": "fp8"}) is None
    assert memory_of(model, options={"external_engine_addrs": ("127.0.0.1:1",)}) is None


def test_on_a_cpu_a_process_has_a_gibibyte_of_keys_and_values(model, parameters):
    memory = memory_of(model, device="cpu", device_bytes=None)
    assert (of(memory, "weights"), of(memory, "keys and values")) == (4 * parameters, 2**30)
    assert memory.kv_tokens == 2**30 // (2 * token_of(model))


@pytest.mark.vllm
def test_the_plan_of_a_run_has_its_adapter(model, tmp_path):
    write_run(tmp_path, model)
    words = [str(tmp_path / "run.toml"), "--engine", "vllm", "--vllm-python", str(PYTHON), "--lora-rank", "4"]
    target = Target(device="cuda", device_bytes=DEVICE, found="a test")
    for transport, found in {"adapter": True, "disk": False}.items():
        asked = parse_words([*words, "--transport", transport], switches=(), options=(), command="run")
        planned = policy_engines(bind_invocation(asked), target)
        assert bool(of(planned.memory, "adapter")) == found
