"""Estimated memory of the embedded engine, compared with the model and the KV cache of a real one."""

import asyncio

import local_oracle as oracle
import pytest

from slime_core.contracts.setup import EngineSetup
from slime_local.config import DirectConfig, LocalConfig
from slime_local.kv_cache import KVCache
from slime_local.model import load_model
from slime_local.plugin import Direct, Local
from slime_training.memory_plan import EngineLoad, MemoryPhase, bytes_at


def setup_of(folder, **more):
    options = {"index": 0, "device": "cpu", "seed": 0, "max_context_len": 64, "max_batch": 4, "run_dir": folder}
    return EngineSetup(model_path=folder, **(options | more))


def memory_of(folder, *, options=None, **more):
    return Local.memory(LocalConfig(**(options or {})), EngineLoad(setup=setup_of(folder, **more), device_bytes=None))


def of(memory, component):
    (line,) = (line for line in memory.lines if line.component == component and line.place == "device")
    return line.num_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["qwen3", "llama", "qwen3_moe"])
def test_bytes_are_those_of_the_model_and_the_store(model, dtype, request):
    folder = request.getfixturevalue(model)
    loaded = load_model(LocalConfig(dtype=dtype), setup_of(folder))
    store = KVCache(loaded.layers, loaded.network.dtype, loaded.device)
    memory = memory_of(folder, options={"dtype": dtype})
    assert of(memory, "weights") == sum(parameter.nbytes for parameter in loaded.network.parameters())
    # Four sequences of 64, and as much again to grow.
    assert of(memory, "keys and values") == 2 * 4 * 64 * store.token_bytes
    assert memory.kv_tokens == 4 * 64


def test_keys_and_values_stay_within_what_is_allowed(qwen3):
    token = of(memory_of(qwen3), "keys and values") // (2 * 4 * 64)
    memory = memory_of(qwen3, options={"kv_cache_bytes": 100 * token}, max_batch=512)
    assert (memory.kv_tokens, of(memory, "keys and values")) == (100, 2 * 100 * token)
    # One sequence always runs.
    assert memory_of(qwen3, options={"kv_cache_bytes": 1}).kv_tokens == 64


def test_what_it_gives_back_on_shared_gpus(qwen3):
    kept, given_back = memory_of(qwen3, device="cuda"), memory_of(qwen3, device="cuda", offload=True)
    assert bytes_at(kept.lines, MemoryPhase.ASLEEP) == of(kept, "weights") + of(kept, "keys and values")
    assert bytes_at(given_back.lines, MemoryPhase.ASLEEP) == 0
    assert bytes_at(given_back.lines, MemoryPhase.SYNC) == of(given_back, "weights")
    assert bytes_at(given_back.lines, MemoryPhase.ASLEEP, "host") == of(given_back, "weights")


def test_buckets_are_no_more_than_the_weights():
    large, small = (Direct.memory(DirectConfig(update_weight_buffer_size=100), size) for size in (1000, 30))
    assert [line.num_bytes for line in large.trainer] == [100, 200]
    assert [line.num_bytes for line in small.trainer] == [30, 30]


@pytest.mark.parametrize(
    ("options", "max_batch"), [({"kv_cache_bytes": 256 * 300}, 64), ({"max_running": 5}, 64), ({}, 5)]
)
async def test_the_store_has_no_more_than_the_estimate(options, max_batch, engines, qwen3, monkeypatch):
    """Neither when many short sequences and few long ones come one after the other, nor when some run together."""
    sizes = []
    reallocate = KVCache.reallocate

    def noted(store, rows, columns, *where):
        reallocate(store, rows, columns, *where)
        sizes.append(rows * columns * store.token_bytes)
        assert sizes[-1] == sum(tensor.nbytes for tensor in (*store.keys, *store.values))

    monkeypatch.setattr(KVCache, "reallocate", noted)
    engine = await engines(qwen3, max_context_len=100, max_batch=max_batch, **options)
    ids = iter(range(10_000))

    def requests(count, prompt, response):
        return [
            oracle.request(next(ids), [3] * prompt, seed=seed, max_new_tokens=response, min_new_tokens=response)
            for seed in range(count)
        ]

    many, few, alone = (40, 2, 3), (3, 40, 55), (1, 99, 1)
    for shape in (many, few, many, alone, few):
        await engine.generate(requests(*shape))
    await asyncio.gather(*(engine.generate(requests(*shape)) for shape in (many, few, many, few)))
    estimate = memory_of(qwen3, options=options, max_context_len=100, max_batch=max_batch)
    assert max(sizes) <= of(estimate, "keys and values")
    # It grows by shares, not row by row or column by column.
    assert len(sizes) < 60
