"""What the embedded engine tells of its memory, beside the model and the store that one really has."""

import pytest

from slime_core.contracts.setup import EngineSetup
from slime_local.config import DirectConfig, LocalConfig
from slime_local.kv_store import KvStore
from slime_local.model import load_model
from slime_local.plugin import Direct, Local
from slime_training.memory_plan import EngineLoad, Moment, bytes_at


def setup_of(folder, **more):
    told = {"index": 0, "device": "cpu", "seed": 0, "max_context_len": 64, "max_batch": 4, "run_dir": folder}
    return EngineSetup(model_path=folder, **(told | more))


def told(folder, *, options=None, **more):
    return Local.memory(LocalConfig(**(options or {})), EngineLoad(setup=setup_of(folder, **more), device_bytes=None))


def of(memory, component):
    (line,) = (line for line in memory.lines if line.component == component and line.place == "device")
    return line.num_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["qwen3", "llama", "qwen3_moe"])
def test_bytes_are_those_of_the_model_and_the_store(model, dtype, request):
    folder = request.getfixturevalue(model)
    loaded = load_model(LocalConfig(dtype=dtype), setup_of(folder))
    store = KvStore(loaded.layers, loaded.network.dtype, loaded.device)
    memory = told(folder, options={"dtype": dtype})
    assert of(memory, "weights") == sum(parameter.nbytes for parameter in loaded.network.parameters())
    # Four sequences of 64, and as much again to grow.
    assert of(memory, "keys and values") == 2 * 4 * 64 * store.token_bytes
    assert memory.kv_tokens == 4 * 64


def test_keys_and_values_stay_within_what_is_allowed(qwen3):
    token = of(told(qwen3), "keys and values") // (2 * 4 * 64)
    memory = told(qwen3, options={"kv_cache_bytes": 100 * token}, max_batch=512)
    assert (memory.kv_tokens, of(memory, "keys and values")) == (100, 2 * 100 * token)
    # One sequence always runs.
    assert told(qwen3, options={"kv_cache_bytes": 1}).kv_tokens == 64


def test_what_it_gives_back_on_shared_gpus(qwen3):
    kept, given_back = told(qwen3, device="cuda"), told(qwen3, device="cuda", offload=True)
    assert bytes_at(kept.lines, Moment.ASLEEP) == of(kept, "weights") + of(kept, "keys and values")
    assert bytes_at(given_back.lines, Moment.ASLEEP) == 0
    assert bytes_at(given_back.lines, Moment.SYNC) == of(given_back, "weights")
    assert bytes_at(given_back.lines, Moment.ASLEEP, "host") == of(given_back, "weights")


def test_buckets_are_no_more_than_the_weights():
    large, small = (Direct.memory(DirectConfig(update_weight_buffer_size=100), size) for size in (1000, 30))
    assert [line.num_bytes for line in large.trainer] == [100, 200]
    assert [line.num_bytes for line in small.trainer] == [30, 30]
