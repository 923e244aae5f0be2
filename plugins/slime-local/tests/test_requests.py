"""How requests end, what is refused, and what happens to the others."""

import asyncio

import local_oracle as oracle
import numpy as np
import pytest

from slime_core.contracts.engine import MemoryTag
from slime_core.errors import EngineError, EngineRefused
from slime_core.types.completion import FinishReason
from slime_core.types.schedule import EngineEvent, EventKind


async def steps(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_stop_tokens_stay_in_the_response(engines, qwen3):
    engine = await engines(qwen3)
    prompts = oracle.prompts(40, seed=20)
    free = await engine.generate([oracle.request(i, p, seed=i, max_new_tokens=20) for i, p in enumerate(prompts)])
    own = [response for response in free if response.finish_reason is FinishReason.STOP]
    assert own
    assert all(response.token_ids[-1] == 2 and 2 not in response.token_ids[:-1] for response in own)

    chosen = [int(response.token_ids[len(response.token_ids) // 2]) for response in free]
    stopped = await engine.generate(
        [oracle.request(i, p, seed=i, max_new_tokens=20, stop_token_ids=(chosen[i],)) for i, p in enumerate(prompts)]
    )
    for response, before, token in zip(stopped, free, chosen, strict=True):
        end = before.token_ids.tolist().index(token) + 1
        assert response.token_ids.tolist() == before.token_ids[:end].tolist()
        assert response.finish_reason is FinishReason.STOP


async def test_stop_strings(engines, qwen3):
    engine = await engines(qwen3)
    prompts = oracle.prompts(6, seed=21)
    free = await engine.generate([oracle.request(i, p, seed=i, max_new_tokens=20) for i, p in enumerate(prompts)])
    stops = [(f"w{a.token_ids[1]} w{a.token_ids[2]}", "never") if len(a.token_ids) > 3 else () for a in free]
    assert sum(map(bool, stops)) >= 3
    stopped = await engine.generate(
        [oracle.request(i, p, seed=i, max_new_tokens=20, stop=stops[i]) for i, p in enumerate(prompts)]
    )
    for response, before, stop in zip(stopped, free, stops, strict=True):
        expected = before.token_ids[:3] if stop else before.token_ids
        assert response.token_ids.tolist() == expected.tolist()
        assert response.finish_reason is (FinishReason.STOP if stop else before.finish_reason)


async def test_stop_strings_need_a_tokenizer(engines, llama):
    engine = await engines(llama)
    with pytest.raises(EngineRefused, match="need a tokenizer"):
        await engine.generate([oracle.request(0, [5], stop=("x",))])
    await engine.health()


async def test_min_new_tokens_bars_every_stop(engines, qwen3):
    engine = await engines(qwen3)
    model = oracle.plain_model(qwen3)
    prompts = oracle.prompts(30, seed=22)
    stops = (5, 6, 7, 8, 9, 10)
    out = await engine.generate(
        [
            oracle.request(i, p, seed=i, max_new_tokens=12, min_new_tokens=4 if i % 2 else 0, stop_token_ids=stops)
            for i, p in enumerate(prompts)
        ]
    )
    assert min(len(response.token_ids) for response in out[::2]) < 4
    for prompt, response in zip(prompts[1::2], out[1::2], strict=True):
        assert len(response.token_ids) >= 5 or response.finish_reason is FinishReason.LENGTH
        assert not {2, *stops} & set(response.token_ids[:4].tolist())
        np.testing.assert_allclose(
            response.log_probs, oracle.log_probs(model, prompt, response.token_ids), atol=1e-5, rtol=0
        )
    assert any(len(response.token_ids) == 5 for response in out[1::2])


async def test_context_bounds_the_response(engines, qwen3):
    engine = await engines(qwen3, max_context_len=9)
    lengths = (1, 5, 8, 9, 12)
    out = await engine.generate([oracle.request(n, np.full(n, 4), max_new_tokens=6, min_new_tokens=6) for n in lengths])
    assert [len(response.token_ids) for response in out] == [6, 4, 1, 0, 0]
    assert all(response.finish_reason is FinishReason.LENGTH for response in out)
    assert out[3].spans == ()
    assert len(out[3].log_probs) == 0


async def test_edges(engines, qwen3):
    engine = await engines(qwen3)
    model = oracle.plain_model(qwen3)
    assert await engine.generate([]) == []
    none, one = await engine.generate(
        [oracle.request("none", [5, 6], max_new_tokens=0), oracle.request("one", [5], max_new_tokens=1, temperature=0)]
    )
    assert len(none.token_ids) == 0
    assert none.finish_reason is FinishReason.LENGTH
    assert one.token_ids.tolist() == oracle.greedy(model, [5], 1)
    assert [(s.start, s.end, s.version) for s in one.spans] == [(0, 1, -1)]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt": []}, "no tokens"),
        ({"prompt": [3, 31]}, "vocabulary has 31"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"stop_token_ids": (99,)}, "outside the vocabulary"),
        ({"stop": ("",)}, "empty string"),
    ],
)
async def test_refused(changes, match, engines, qwen3):
    engine = await engines(qwen3)
    prompt = changes.pop("prompt", [3, 4])
    with pytest.raises(EngineError, match=match):
        await engine.generate([oracle.request("fine", [3]), oracle.request("wrong", prompt, **changes)])
    assert not engine._decoder.busy
    assert len(await engine.generate([oracle.request("fine", [3])])) == 1


async def test_request_ids_are_unique(engines, qwen3):
    engine = await engines(qwen3)
    with pytest.raises(EngineError, match="given twice"):
        await engine.generate([oracle.request("a", [3]), oracle.request("a", [4])])
    running = asyncio.ensure_future(engine.generate([oracle.request("a", [3], min_new_tokens=10)]))
    await steps(3)
    with pytest.raises(EngineError, match="in use"):
        await engine.generate([oracle.request("a", [4])])
    await running
    await engine.generate([oracle.request("a", [4])])


async def test_abort_one_and_all(engines, qwen3):
    engine = await engines(qwen3, max_running=3)
    prompts = oracle.prompts(5, seed=23)
    batch = [oracle.request(i, p, seed=i, max_new_tokens=60, min_new_tokens=60) for i, p in enumerate(prompts)]
    whole = await engine.generate(batch)
    running = asyncio.ensure_future(engine.generate(batch))
    await steps(8)
    await engine.abort(["1", "unknown"])
    await steps(8)
    assert not running.done()
    await engine.abort()
    out = await asyncio.wait_for(running, 60)
    sizes = [len(response.token_ids) for response in out]
    assert all(response.finish_reason is FinishReason.ABORT for response in out)
    assert 0 < sizes[1] < sizes[0] == sizes[2] < 60
    assert sizes[4] == 0
    assert 0 < sizes[3] < sizes[0]
    for response, complete in zip(out, whole, strict=True):
        size = len(response.token_ids)
        assert response.token_ids.tolist() == complete.token_ids[:size].tolist()
        np.testing.assert_allclose(response.log_probs, complete.log_probs[:size], atol=1e-5)
        assert sum(span.end - span.start for span in response.spans) == size
    assert not engine._decoder.busy


async def test_a_cancelled_call_frees_its_rows(engines, qwen3):
    engine = await engines(qwen3)
    gone = asyncio.ensure_future(engine.generate([oracle.request("gone", [3], max_new_tokens=100, min_new_tokens=100)]))
    stays = asyncio.ensure_future(engine.generate([oracle.request("stays", [4], max_new_tokens=20, min_new_tokens=20)]))
    await steps(4)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert engine._decoder.request_ids == {"stays"}
    assert len((await stays)[0].token_ids) == 20


async def test_an_error_in_a_step_fails_the_calls(engines, qwen3):
    engine = await engines(qwen3, max_running=1)
    running = asyncio.ensure_future(
        engine.generate([oracle.request(i, [3], max_new_tokens=50, min_new_tokens=50) for i in range(2)])
    )
    await steps(3)

    def broken():
        raise MemoryError("no more columns")

    engine._decoder.step = broken
    with pytest.raises(EngineError, match="MemoryError: no more columns"):
        await asyncio.wait_for(running, 60)
    for call in (engine.health(), engine.generate([oracle.request(9, [3])])):
        with pytest.raises(EngineError, match="no more columns"):
            await call
    await engine.stop()
    with pytest.raises(RuntimeError, match="shutdown"):
        engine._threads._pool.submit(str)


async def test_stop_fails_what_runs(engines, qwen3):
    engine = await engines(qwen3)
    running = asyncio.ensure_future(engine.generate([oracle.request(0, [3], max_new_tokens=90, min_new_tokens=90)]))
    await steps(3)
    await engine.stop()
    await engine.stop()
    with pytest.raises(EngineError, match="stopped"):
        await asyncio.wait_for(running, 60)


async def test_sleep(engines, qwen3):
    engine = await engines(qwen3)
    request = oracle.request(0, [3, 4, 5], temperature=0, max_new_tokens=30, min_new_tokens=30)
    before = (await engine.generate([request]))[0].token_ids.tolist()
    running = asyncio.ensure_future(engine.generate([request]))
    await steps(3)
    with pytest.raises(EngineError, match="1 requests run"):
        await engine.sleep()
    await running
    assert engine._decoder._slots.store.keys[0].numel() > 0
    await engine.sleep()
    assert engine._decoder._slots.store.keys[0].numel() == 0
    with pytest.raises(EngineError, match="asleep"):
        await engine.generate([request])
    await engine.health()
    await engine.wake_up()
    assert (await engine.generate([request]))[0].token_ids.tolist() == before


async def test_nothing_is_computed_with_weights_that_sleep(engines, qwen3):
    engine = await engines(qwen3)
    running = asyncio.ensure_future(engine.generate([oracle.request(0, [3], max_new_tokens=30, min_new_tokens=30)]))
    await steps(3)
    await engine.sleep([MemoryTag.WEIGHTS])
    held = engine._decoder._slots.end
    await steps(5)
    assert engine._decoder._slots.end == held
    await engine.wake_up()
    assert len((await running)[0].token_ids) == 30


async def test_a_script_that_waits_lets_others_run(engines, qwen3):
    """Not the decode task, again and again without a step."""
    engine = await engines(qwen3)
    running = asyncio.ensure_future(engine.generate([oracle.request(0, [3], max_new_tokens=30, min_new_tokens=30)]))
    await steps(3)
    await engine.replay_events([EngineEvent(0, EventKind.SUBMIT, ("late",))])
    runs = engine._runnable.is_set()
    engine._runnable.clear()
    assert not runs
    await engine.generate([oracle.request("late", [3])])
    assert len((await running)[0].token_ids) == 30
