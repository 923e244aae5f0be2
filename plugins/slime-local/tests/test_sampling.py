"""Draws: the right frequencies, from the seed and the position alone, among the tokens allowed."""

from functools import partial

import local_oracle as oracle
import numpy as np
import pytest
import torch

from slime_local.random_draws import stream_keys, uniforms
from slime_local.sampler import Draw, Special, sample


def splitmix64(seed):
    """The reference generator in plain integers."""
    mask = (1 << 64) - 1
    state = seed & mask
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_uniforms_are_splitmix64():
    assert next(splitmix64(1234567)) == 6457827717110365317  # a value of other implementations
    for seed in (0, 1, 2**63, 2**64 - 1, -5, 10**30):
        key = next(splitmix64(seed))
        stream = splitmix64(key)
        expected = [(next(stream) >> 12) / 2**52 for _ in range(6)]
        found = uniforms(stream_keys([seed] * 6), torch.arange(6))
        assert found.tolist() == expected


def chi_square(counts, probs):
    """Statistic over cells with at least 5 expected (the rest as one), and its degrees of freedom."""
    expected = counts.sum() * probs
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    binned = np.append(expected[big], expected[~big].sum())
    keep = binned > 0
    return float((((observed - binned) ** 2)[keep] / binned[keep]).sum()), int(keep.sum()) - 1


async def first_tokens(engine, prompt, count, **sampling):
    out = await engine.generate([oracle.request(i, prompt, seed=i, max_new_tokens=1, **sampling) for i in range(count)])
    return np.bincount([int(response.token_ids[0]) for response in out], minlength=31)


async def test_frequencies(engines, qwen3):
    engine = await engines(qwen3, max_batch=4000)
    model = oracle.plain_model(qwen3)
    for temperature, prompt in zip((1.0, 0.6, 1.8), oracle.prompts(3, seed=7), strict=True):
        counts = await first_tokens(engine, prompt, 4000, temperature=temperature)
        statistic, freedom = chi_square(counts, oracle.next_probs(model, prompt, temperature))
        assert freedom >= 5
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5
        wrong, _ = chi_square(counts, oracle.next_probs(model, prompt, temperature * 1.3))
        assert wrong > freedom + 4 * (2 * freedom) ** 0.5


def test_logits_that_are_not_finite_give_a_log_prob_that_is_not_and_no_error():
    """So the trainer names the samples and the learning rate, and no engine is restarted for what the weights have done."""
    logits = torch.randn(3, 31)
    logits[1, 4] = torch.nan
    logits[2] = torch.nan
    draw = Draw(
        keys=stream_keys([1, 2, 3]),
        positions=torch.arange(3),
        temperature=torch.ones(3),
        greedy=torch.zeros(3, dtype=torch.bool),
        top_p=torch.ones(3),
        top_k=torch.full((3,), 31),
        penalty=torch.ones(3),
    )
    tokens, log_probs = sample(
        logits, draw, Special(), seen_NV=None, barred_NV=None, log_softmax=partial(torch.log_softmax, dim=-1)
    )
    assert ((tokens >= 0) & (tokens < 31)).all()
    assert log_probs.isfinite().tolist() == [True, False, False]


async def test_top_k_and_top_p_keep_only_allowed_tokens(engines, qwen3):
    engine = await engines(qwen3, max_batch=4000)
    model = oracle.plain_model(qwen3)
    for prompt in oracle.prompts(40, seed=8, low=6):
        probs = oracle.next_probs(model, prompt)
        order = np.argsort(-probs)
        before = np.cumsum(probs[order]) - probs[order]
        top_4 = order[:4]
        nucleus = order[before < 0.7]
        both = top_4[np.cumsum(probs[top_4]) - probs[top_4] < 0.5 * probs[top_4].sum()]
        if 1 < len(both) < 4 < len(nucleus):
            break
    assert 1 < len(both) < 4 < len(nucleus)
    for sampling, allowed in (({"top_k": 4}, top_4), ({"top_p": 0.7}, nucleus), ({"top_k": 4, "top_p": 0.5}, both)):
        counts = await first_tokens(engine, prompt, 1500, **sampling)
        assert set(np.flatnonzero(counts)) == set(allowed)
        kept = np.zeros(31)
        kept[allowed] = probs[allowed] / probs[allowed].sum()
        statistic, freedom = chi_square(counts, kept)
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5

    # Log-probs stay those of the full distribution.
    response = (await engine.generate([oracle.request("x", prompt, top_k=2, top_p=0.9, temperature=0.8)]))[0]
    np.testing.assert_allclose(
        response.log_probs, oracle.log_probs(model, prompt, response.token_ids, 0.8), atol=1e-5, rtol=0
    )


async def test_draws_do_not_depend_on_the_batch(engines, qwen3):
    engine = await engines(qwen3)
    prompt = oracle.prompts(1, seed=9, low=8)[0]
    target = oracle.request("t", prompt, seed=77, max_new_tokens=25, temperature=1.2)
    alone = (await engine.generate([target]))[0]
    # Company of every kind, so that the row goes through every branch of the sampler.
    company = [
        oracle.request(0, oracle.prompts(1, seed=10, low=12)[0], seed=1, top_k=3, max_new_tokens=3),
        oracle.request(1, prompt, seed=2, temperature=0, max_new_tokens=9),
        oracle.request(2, prompt[:3], seed=3, repetition_penalty=1.3, min_new_tokens=20, max_new_tokens=30),
    ]
    beside = (await engine.generate([*company, target]))[3]
    assert beside.token_ids.tolist() == alone.token_ids.tolist()
    # Cut anywhere and sent again with its tokens so far, it continues with the same draws.
    for cut in (1, len(alone.token_ids) // 2):
        longer = np.concatenate([prompt, alone.token_ids[:cut]])
        rest = (
            await engine.generate([oracle.request("r", longer, seed=77, max_new_tokens=25 - cut, temperature=1.2)])
        )[0]
        assert rest.token_ids.tolist() == alone.token_ids[cut:].tolist()


@pytest.mark.bits
async def test_equal_batches_give_equal_bits(engines, qwen3):
    engine = await engines(qwen3, max_running=7)
    batch = [oracle.request(i, p, seed=i, max_new_tokens=12) for i, p in enumerate(oracle.prompts(15, seed=11))]
    first = await engine.generate(batch)
    # Something longer in between, which leaves other buffers behind.
    await engine.generate([oracle.request("l", oracle.prompts(1, seed=12)[0], max_new_tokens=90, min_new_tokens=90)])
    again = await engine.generate(batch)
    fresh = await (await engines(qwen3, max_running=7)).generate(batch)
    for one, two, three in zip(first, again, fresh, strict=True):
        assert one.token_ids.tobytes() == two.token_ids.tobytes() == three.token_ids.tobytes()
        assert one.log_probs.tobytes() == two.log_probs.tobytes() == three.log_probs.tobytes()
    other = await engine.generate(
        [oracle.request(i, p, seed=i + 1, max_new_tokens=12) for i, p in enumerate(oracle.prompts(15, seed=11))]
    )
    assert any(one.token_ids.tolist() != two.token_ids.tolist() for one, two in zip(first, other, strict=True))


async def test_repetition_penalty_equals_transformers(engines, qwen3):
    engine = await engines(qwen3)
    model = oracle.plain_model(qwen3)
    prompts = oracle.prompts(6, seed=13)
    out = await engine.generate(
        [
            oracle.request(i, p, temperature=0, repetition_penalty=1.7 if i % 2 else 1.0, max_new_tokens=15)
            for i, p in enumerate(prompts)
        ]
    )
    changed = 0
    for i, (prompt, response) in enumerate(zip(prompts, out, strict=True)):
        expected = oracle.greedy(model, prompt, 15, repetition_penalty=1.7 if i % 2 else 1.0)
        assert response.token_ids.tolist() == expected
        np.testing.assert_allclose(
            response.log_probs, oracle.log_probs(model, prompt, response.token_ids), atol=1e-5, rtol=0
        )
        changed += i % 2 and expected != oracle.greedy(model, prompt, 15)
    assert changed
