"""New weights: what is checked, what is active when, and what running requests make of it."""

import asyncio
import dataclasses

import local_oracle as oracle
import numpy as np
import pytest
import torch
import xxhash

from slime_core.errors import EngineError
from slime_plugin_kit.tiny_model import with_longer_header


async def load(engine, made):
    for bucket in made:
        await engine.load_bucket(bucket)


def expected_checksum(model):
    digest = xxhash.xxh3_64()
    for _, parameter in sorted(oracle.as_in_files(model).items()):
        digest.update(parameter.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
async def test_loaded_weights_are_used(family, engines, request):
    folder = request.getfixturevalue(family)
    engine = await engines(folder)
    assert await engine.version() == -1
    assert await engine.checksum() == expected_checksum(oracle.plain_model(folder))
    new = oracle.other_weights(folder, seed=1)
    made = oracle.buckets(new, version=4, count=3)
    await load(engine, made[:2])
    assert await engine.version() == -1
    await engine.load_bucket(made[2])
    assert await engine.version() == 4
    assert await engine.checksum() == expected_checksum(new) != expected_checksum(oracle.plain_model(folder))
    prompts = oracle.prompts(4, seed=30)
    out = await engine.generate([oracle.request(i, p, seed=i) for i, p in enumerate(prompts)])
    for prompt, response in zip(prompts, out, strict=True):
        np.testing.assert_allclose(response.log_probs, oracle.log_probs(new, prompt, response.token_ids), atol=1e-5)
        assert [(s.version, s.start, s.end) for s in response.spans] == [(4, 0, len(response.token_ids))]
    await load(engine, oracle.buckets(new, version=4, count=1))
    assert await engine.version() == 4


@pytest.mark.parametrize("options", [{}, {"max_prefill_tokens": 12}, {"linear": "torch", "max_running": 4}])
async def test_new_weights_under_running_requests(options, engines, qwen3):
    """Each span's log-probs are those of its version's weights over everything so far."""
    engine = await engines(qwen3, **options)
    versions = {0: oracle.plain_model(qwen3), 1: oracle.other_weights(qwen3, 2), 2: oracle.other_weights(qwen3, 3)}
    await load(engine, oracle.buckets(versions[0], 0))
    prompts = oracle.prompts(6, seed=31)
    running = asyncio.ensure_future(
        engine.generate(
            [oracle.request(i, p, seed=i, max_new_tokens=30 + i, min_new_tokens=20) for i, p in enumerate(prompts)]
        )
    )
    for version in (1, 2):
        for _ in range(12):
            await asyncio.sleep(0)
        await engine.pause()
        held = engine._decoder._slots.end
        for bucket in oracle.buckets(versions[version], version, 3):
            await engine.load_bucket(bucket)
            for _ in range(4):
                await asyncio.sleep(0)
        assert engine._decoder._slots.end == held
        assert await engine.version() == version
        await engine.resume()
    out = await running
    seen = set()
    for prompt, response in zip(prompts, out, strict=True):
        assert response.spans[0].start == 0
        assert response.spans[-1].end == len(response.token_ids)
        for one, two in zip(response.spans, response.spans[1:], strict=False):
            assert one.end == two.start
            assert one.version < two.version
        for version, start, end in response.spans:
            seen.add((version, len(response.spans)))
            expected = oracle.log_probs(versions[version], prompt, response.token_ids)[start:end]
            np.testing.assert_allclose(response.log_probs[start:end], expected, atol=2e-5, rtol=0)
            others = [oracle.log_probs(m, prompt, response.token_ids) for v, m in versions.items() if v != version]
            assert all(np.abs(other[start:end] - expected).max() > 1e-3 for other in others)
    assert {(0, 3), (1, 3), (2, 3)} <= seen


async def test_keys_of_weights_that_diverged_reach_no_later_request(engines, qwen3):
    """A short sequence is padded with the places of those before it."""
    diverged = oracle.plain_model(qwen3)
    with torch.no_grad():
        diverged.model.layers[0].self_attn.k_proj.weight.fill_(torch.nan)
    engine, unused = await engines(qwen3), await engines(qwen3, index=1)
    await load(engine, oracle.buckets(diverged, 1))
    lost = await engine.generate([oracle.request(i, [3] * 20, max_new_tokens=8, min_new_tokens=8) for i in range(4)])
    assert all(np.isnan(response.log_probs).all() for response in lost)
    responses = []
    for each in (engine, unused):
        await load(each, oracle.buckets(oracle.other_weights(qwen3, seed=1), 2))
        long = oracle.request("long", [4] * 20, max_new_tokens=30, min_new_tokens=30)
        running = asyncio.ensure_future(each.generate([long]))
        for _ in range(5):
            await asyncio.sleep(0)
        short = [oracle.request(i, [5, i], seed=i, max_new_tokens=8, min_new_tokens=8) for i in range(3)]
        responses.append([*await each.generate(short), *await running])
    found, expected = ([(one.token_ids.tolist(), one.log_probs.tolist()) for one in each] for each in responses)
    assert found == expected
    assert all(np.isfinite(log_probs).all() for _, log_probs in expected)


async def test_pause_holds_requests_and_abort_returns_them(engines, qwen3):
    engine = await engines(qwen3)
    running = asyncio.ensure_future(engine.generate([oracle.request(0, [3], max_new_tokens=50, min_new_tokens=50)]))
    for _ in range(5):
        await asyncio.sleep(0)
    await engine.pause()
    size = engine._decoder._slots.end
    later = asyncio.ensure_future(engine.generate([oracle.request(1, [3])]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine._decoder._slots.end == size
    assert not later.done()
    await engine.abort(["0"])
    assert 0 < len((await running)[0].token_ids) < 50
    await engine.resume()
    assert len((await later)[0].token_ids) > 0


async def test_half_a_version_is_never_sampled(engines, qwen3):
    engine = await engines(qwen3)
    new = oracle.other_weights(qwen3, 4)
    first, last = oracle.buckets(new, 1)
    await engine.load_bucket(first)
    waiting = asyncio.ensure_future(engine.generate([oracle.request(0, [3, 4])]))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    with pytest.raises(EngineError, match="partly loaded"):
        await engine.resume()
    await engine.load_bucket(last)
    response = (await waiting)[0]
    np.testing.assert_allclose(response.log_probs, oracle.log_probs(new, [3, 4], response.token_ids), atol=1e-5)


async def scored(engine, tokens):
    (found,) = await engine.score([tokens], [len(tokens) - 1])
    return found


async def of_prompt(engine, tokens):
    (found,) = await engine.prompt_log_probs([tokens], 1, None)
    return found.log_probs


@pytest.mark.parametrize("log_probs", [scored, of_prompt])
async def test_half_a_version_computes_no_log_probs(log_probs, engines, qwen3):
    engine = await engines(qwen3)
    tokens = np.array([3, 4, 9, 8, 4], np.int32)
    new = oracle.other_weights(qwen3, 4)
    first, last = oracle.buckets(new, 1)
    await engine.load_bucket(first)
    waiting = asyncio.create_task(log_probs(engine, tokens))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    await engine.load_bucket(last)
    # The next version comes before the task has a turn.
    first, last = oracle.buckets(oracle.other_weights(qwen3, 5), 2)
    await engine.load_bucket(first)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    await engine.load_bucket(last)
    expected = oracle.log_probs(oracle.other_weights(qwen3, 5), tokens[:1], tokens[1:])
    np.testing.assert_allclose(await waiting, expected, atol=1e-5)


@pytest.mark.parametrize("log_probs", [scored, of_prompt])
async def test_log_probs_that_wait_for_weights_fail_with_the_engine(log_probs, engines, qwen3):
    engine = await engines(qwen3)
    await engine.load_bucket(oracle.buckets(oracle.other_weights(qwen3, 4), 1)[0])
    waiting = asyncio.create_task(log_probs(engine, np.array([3, 4], np.int32)))
    await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineError, match="it was stopped"):
        await waiting


async def test_damaged_bucket(engines, qwen3):
    engine = await engines(qwen3)
    before = await engine.checksum()
    good = oracle.buckets(oracle.other_weights(qwen3, 5), 7)
    data = good[0].data.copy()
    data[100] ^= 1
    with pytest.raises(EngineError, match="engine 0: bucket 0 of version 7 is damaged"):
        await engine.load_bucket(dataclasses.replace(good[0], data=data))
    assert await engine.checksum() == before
    assert await engine.version() == -1
    with pytest.raises(EngineError, match="out of order"):
        await engine.load_bucket(good[1])
    await load(engine, good)
    assert await engine.version() == 7


async def test_tensors_that_do_not_fit(engines, qwen3):
    engine = await engines(qwen3)
    model = oracle.other_weights(qwen3, 6)
    (bucket,) = oracle.buckets(model, 1, count=1)
    last = len(bucket.names) - 1
    wrong_name = [*bucket.names[:last], "model.norm.wieght"]
    with pytest.raises(EngineError, match=r"unexpected names model.norm.wieght.*model.norm.weight"):
        await engine.load_bucket(dataclasses.replace(bucket, names=wrong_name))
    with pytest.raises(EngineError, match=r"model.norm.weight has shape \(16, 2\), the model's is \(32,\)"):
        await engine.load_bucket(dataclasses.replace(bucket, shapes=[*bucket.shapes[:last], (16, 2)]))
    with pytest.raises(EngineError, match=r'model.norm.weight is bfloat16.*engine.dtype = "bfloat16"'):
        await engine.load_bucket(dataclasses.replace(bucket, dtypes=[*bucket.dtypes[:last], "bfloat16"]))
    short = bucket.data[:-4]
    with pytest.raises(EngineError, match="bytes, it holds"):
        await engine.load_bucket(dataclasses.replace(bucket, data=short, checksum=xxhash.xxh3_64_hexdigest(short)))
    assert await engine.checksum() == expected_checksum(oracle.plain_model(qwen3))
    missing = oracle.buckets(model, 1, skip={"model.layers.1.mlp.up_proj.weight"})
    await engine.load_bucket(missing[0])
    with pytest.raises(EngineError, match=r"bucket 1 of version 1.*missing: model.layers.1.mlp.up_proj.weight"):
        await engine.load_bucket(missing[1])
    assert await engine.version() == -1
    with pytest.raises(EngineError, match="partly loaded"):
        await engine.resume()


async def test_tied_head(engines, qwen3):
    engine = await engines(qwen3)
    model = oracle.other_weights(qwen3, 7)
    await load(engine, oracle.buckets(model, 1, tied_twice=True))
    assert await engine.checksum() == expected_checksum(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    with pytest.raises(EngineError, match="tied to another tensor"):
        await load(engine, oracle.buckets(model, 2))


async def test_bfloat16(engines, qwen3):
    engine = await engines(qwen3, dtype="bfloat16")
    model = oracle.other_weights(qwen3, 8).to(torch.bfloat16)
    # The odd number of bytes before the second tensor of a mixed bucket may not matter.
    await load(engine, oracle.buckets(model, 1, count=3))
    reference = model.float()
    response = (await engine.generate([oracle.request(0, [3, 9, 4], max_new_tokens=12, min_new_tokens=12)]))[0]
    expected = oracle.log_probs(reference, [3, 9, 4], response.token_ids)
    assert np.abs(response.log_probs - expected).max() < 0.3


async def test_auto_takes_what_a_trainer_on_the_cpu_sends_to_a_bfloat16_folder(engines, llama, tmp_path):
    oracle.plain_model(llama).to(torch.bfloat16).save_pretrained(tmp_path)
    engine = await engines(tmp_path)
    new = oracle.other_weights(llama, seed=10)
    await load(engine, oracle.buckets(new, version=1))
    assert await engine.checksum() == expected_checksum(new)


@pytest.mark.bits
@pytest.mark.parametrize("linear", ["onednn", "torch"])
async def test_where_weights_begin_in_their_file_changes_no_bit(linear, engines, qwen3, tmp_path):
    """Decoded alone, a token's products have one row."""

    async def generated(num_bytes):
        engine = await engines(with_longer_header(qwen3, tmp_path / f"{num_bytes} bytes", num_bytes), linear=linear)
        prompts = oracle.prompts(3, seed=7)
        alone = [await engine.generate([oracle.request(i, prompt, seed=i)]) for i, prompt in enumerate(prompts)]
        return [(response.token_ids.tolist(), response.log_probs.tobytes()) for (response,) in alone]

    first, *others = [await generated(num_bytes) for num_bytes in (0, 4, 8, 12)]
    assert all(other == first for other in others)
