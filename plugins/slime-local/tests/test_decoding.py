"""Tokens and log-probs against transformers alone."""

import asyncio
import json
import shutil

import local_oracle as oracle
import numpy as np
import pytest

from slime_core.types.completion import FinishReason
from slime_local.decoder import passes


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("options", [{}, {"max_running": 5}, {"max_running": 3, "max_prefill_tokens": 16}])
async def test_greedy_equals_transformers(family, options, engines, request):
    folder = request.getfixturevalue(family)
    engine = await engines(folder, **options)
    model = oracle.plain_model(folder)
    prompts = oracle.prompts(14)
    lengths = [1 + (7 * i) % 23 for i in range(14)]
    out = await engine.generate(
        [oracle.request(i, p, temperature=0, max_new_tokens=lengths[i]) for i, p in enumerate(prompts)]
    )
    reasons = set()
    for prompt, length, response in zip(prompts, lengths, out, strict=True):
        assert response.token_ids.tolist() == oracle.greedy(model, prompt, length)
        assert response.token_ids.dtype == np.int32
        reasons.add(response.finish_reason)
    assert FinishReason.LENGTH in reasons
    assert [response.request_id for response in out] == [str(i) for i in range(14)]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.6])
async def test_log_probs_equal_a_plain_forward(family, temperature, engines, request):
    folder = request.getfixturevalue(family)
    engine = await engines(folder, max_running=6)
    model = oracle.plain_model(folder)
    prompts = oracle.prompts(10, seed=1)
    out = await engine.generate(
        [oracle.request(i, p, temperature=temperature, max_new_tokens=12, seed=i) for i, p in enumerate(prompts)]
    )
    for prompt, response in zip(prompts, out, strict=True):
        expected = oracle.log_probs(model, prompt, response.token_ids, temperature or 1.0)
        np.testing.assert_allclose(response.log_probs, expected, atol=1e-5, rtol=0)
        assert response.log_probs.dtype == np.float32
    assert len({tuple(response.token_ids) for response in out}) > 5


async def test_a_released_config_sets_how_many_features_are_rotated(engines, minimax_m2, tmp_path):
    """transformers 5.12 does not read this key of MiniMax-M2's."""
    folder = shutil.copytree(minimax_m2, tmp_path / "released")
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    assert raw["rope_parameters"].pop("partial_rotary_factor") == 0.5
    file.write_text(json.dumps(raw | {"rotary_dim": 4}))
    engine = await engines(folder)
    model, prompts = oracle.plain_model(minimax_m2), oracle.prompts(4, seed=3)
    out = await engine.generate([oracle.request(i, p, seed=i) for i, p in enumerate(prompts)])
    for prompt, response in zip(prompts, out, strict=True):
        expected = oracle.log_probs(model, prompt, response.token_ids)
        np.testing.assert_allclose(response.log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("linear", ["torch", "onednn"])
async def test_many_rows(linear, engines, qwen3):
    """Enough rows for the other kernel of the linear layers, and long enough for columns to be laid out anew."""
    engine = await engines(qwen3, linear=linear, max_batch=64)
    model = oracle.plain_model(qwen3)
    prompts = oracle.prompts(80, seed=2, high=20)
    out = await engine.generate(
        [
            oracle.request(i, p, seed=i, max_new_tokens=70 if i % 9 == 0 else 4, min_new_tokens=60 if i % 9 == 0 else 0)
            for i, p in enumerate(prompts)
        ]
    )
    assert max(len(response.token_ids) for response in out) >= 60
    for prompt, response in list(zip(prompts, out, strict=True))[::3]:
        np.testing.assert_allclose(
            response.log_probs, oracle.log_probs(model, prompt, response.token_ids), atol=2e-5, rtol=0
        )


async def test_requests_that_come_later(engines, qwen3):
    engine = await engines(qwen3, max_running=4)
    model = oracle.plain_model(qwen3)
    prompts = [*oracle.prompts(6, seed=3), np.arange(3, 28, dtype=np.int32)]

    async def one(index):
        for _ in range(3 * index):
            await asyncio.sleep(0)
        request = oracle.request(index, prompts[index], temperature=0, max_new_tokens=15, min_new_tokens=15)
        return (await engine.generate([request]))[0]

    out = await asyncio.gather(*(one(index) for index in range(7)))
    for prompt, response in zip(prompts, out, strict=True):
        assert response.token_ids.tolist() == oracle.greedy(model, prompt, 15, min_new_tokens=15)


async def test_shared_prompts_change_nothing(engines, qwen3):
    engine = await engines(qwen3)
    prompt, other = oracle.prompts(2, seed=4, low=5)
    group = [oracle.request(f"g{i}", prompt, seed=i, max_new_tokens=8) for i in range(6)]
    mixed = [group[0], oracle.request("o", other, seed=50), *group[1:]]
    together = await engine.generate(mixed)
    assert [response.cached_tokens for response in together] == [0, 0] + [len(prompt)] * 5
    alone = [(await engine.generate([one]))[0] for one in mixed]
    for first, second in zip(together, alone, strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        np.testing.assert_allclose(first.log_probs, second.log_probs, atol=1e-5)
    assert len({tuple(response.token_ids) for response in together}) > 3


async def test_small_cache_waits(engines, qwen3):
    """Two layers, two heads of 8, keys and values, float32: 256 bytes a token; room for about 3 of 7 at a time."""
    engine = await engines(qwen3, kv_cache_bytes=256 * 3 * 22)
    model = oracle.plain_model(qwen3)
    prompts = oracle.prompts(7, seed=5)
    seen = []
    step = engine._decoder.step
    engine._decoder.step = lambda: (step(), seen.append(len(engine._decoder._rows)))
    out = await engine.generate([oracle.request(i, p, temperature=0) for i, p in enumerate(prompts)])
    assert 1 <= max(seen) <= 3 + 1
    assert [a.token_ids.tolist() for a in out] == [oracle.greedy(model, p, 10) for p in prompts]


async def test_sliding_window(tmp_path, engines):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, eos_token_id=2, initializer_range=0.35,
        use_sliding_window=True, sliding_window=5, max_window_layers=1,
    )  # fmt: skip
    assert config.layer_types == ["full_attention", "sliding_attention"]
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    engine = await engines(tmp_path)
    model = oracle.plain_model(tmp_path)
    prompts = oracle.prompts(6, seed=6)
    out = await engine.generate([oracle.request(i, p, seed=i, max_new_tokens=9) for i, p in enumerate(prompts)])
    for prompt, response in zip(prompts, out, strict=True):
        np.testing.assert_allclose(
            response.log_probs, oracle.log_probs(model, prompt, response.token_ids), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("rows", "hidden_size", "expected"),
    [
        (511, 64, 1), (512, 64, 2), (4096, 64, 2), (4097, 64, 4),
        (2048, 128, 2), (2049, 128, 4), (2048, 4096, 2), (2049, 4096, 4),
    ],
)  # fmt: skip
def test_a_pass_has_more_rows_where_a_model_is_small(rows, hidden_size, expected):
    assert passes(rows, hidden_size) == expected
