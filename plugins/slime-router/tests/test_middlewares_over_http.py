"""Middlewares in the router: what they see, and what becomes of the bytes."""

import json

import numpy as np
import pytest
from router_fake_engine import ASKED, events, response_to

from slime_core.types.completion import FinishReason
from slime_core.types.sample import VersionSpan
from slime_router.requests import parse
from slime_router.wire import WireCompletion, response_body


@pytest.fixture
def radix(characters):
    return f'{{ name = "radix_cache", tokenizer = "{characters}" }}'


FOUR, TWO, SEVEN, ASK, FORTY_TWO = 6, 4, 9, 14, 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("incremental", [False, True])
async def test_text_becomes_the_tokens_that_the_engine_wrote(route, engine, radix, stream, incremental):
    engine.incremental = incremental
    engine.reply = lambda body: {**response_to(body, token_ids=(FOUR, TWO)), "text": "42"}
    session = {"headers": {"x-smg-routing-key": "s"}}
    first = {
        "rid": "a",
        "text": "7?",
        "sampling_params": {"max_new_tokens": 4},
        "return_logprob": True,
        "extra": {"k": 1},
    }
    async with route(engine, middlewares=[radix]) as router:
        status, data, _ = await router.post({**first, "stream": stream}, **session)
        assert status == 200
        if not stream:
            expected = response_to(first, token_ids=(FOUR, TWO))
            expected["meta_info"] |= {"prompt_tokens": 2, "prompt_token_ids": [SEVEN, ASK]}
            assert json.loads(data) == {**expected, "text": "42"}
        await router.generate({"text": "7?42?42"}, **session)
        status, found, _ = await router.post({"text": "7?42?"}, path="/retrieve_from_text", **session)
        assert (await router.post({"txt": "7?"}, path="/retrieve_from_text"))[0] == 400
        assert (
            await router.counter('slime_router_middleware{counter="known_tokens",middleware="radix_cache",place="0"}')
            == 4
        )
    # The first request is sent without its text, and with all its other fields.
    assert engine.seen[0] == {
        "rid": "a", "input_ids": [SEVEN, ASK], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True,
        "extra": {"k": 1}, "stream": stream,
    }  # fmt: skip
    assert engine.seen[1]["input_ids"] == [SEVEN, ASK, FOUR, TWO, ASK, FORTY_TWO]
    assert json.loads(found) == {
        "tokens": [SEVEN, ASK, FOUR, TWO, ASK],
        "log_probs": [0, 0, -0.25, -0.5, 0],
        "loss_mask": [0, 0, 1, 1, 0],
        "weight_versions": [{"version": 5, "start": 2, "end": 4}],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_recorded_responses_are_replayed_without_an_engine(route, engine, tmp_path, stream):
    path = tmp_path / "answers.jsonl"
    async with route(engine, middlewares=[f'{{ name = "record", path = "{path}" }}']) as router:
        _, given, _ = await router.post(ASKED)
        await router.post({**ASKED, "input_ids": [[1], [2]], "stream": True})
    assert len(path.read_text().splitlines()) == 3
    replay = f'{{ name = "record", path = "{path}", mode = "replay" }}'
    async with route(middlewares=[replay]) as router:
        status, data, _ = await router.post({**ASKED, "stream": stream})
        assert status == 200, data
        assert (events(data) if stream else [json.loads(data)]) == [json.loads(given)]
        _, data, _ = await router.post({**ASKED, "input_ids": [[1], [2]], "stream": stream})
        last = events(data) if stream else json.loads(data)
        assert [one["output_ids"] for one in last] == [[1, 2, 9], [1, 2, 9]]
        if stream:
            assert sorted(one["index"] for one in last) == [0, 1]
        status, data, _ = await router.post({**ASKED, "input_ids": [77]})
    assert status == 500
    assert b"no response to it was recorded" in data


async def test_load_and_sessions_choose_the_upstream(route, engines):
    async with route(*engines, middlewares=["load_balance", "session_affinity"]) as router:
        for session in ("a", "b", "a", "a", "b"):
            await router.generate(ASKED, headers={"x-smg-routing-key": session})
        sessions = [{one["x-smg-routing-key"] for one in engine.headers} for engine in engines]
        gauge = 'slime_router_middleware{counter="kept",middleware="session_affinity",place="0"}'
        assert await router.counter(gauge) == 3
    assert sorted(len(found) for found in sessions) in ([0, 2], [1, 1])
    assert not sessions[0] & sessions[1]


async def test_too_many_requests(route, engine):
    limit = '{ name = "rate_limit", requests_per_second = 0.001, burst = 1, max_wait_s = 0.0 }'
    async with route(engine, middlewares=[limit]) as router:
        await router.generate(ASKED)
        status, data, headers = await router.post(ASKED)
    assert status == 429
    assert 900 < int(headers["retry-after"]) <= 1000
    assert b"rate_limit" in data


def wire(**fields):
    body = json.dumps({**response_to({"rid": "a"}), **fields}).encode()
    return WireCompletion.of([body], request_id="a", engine_index=4)


def test_a_response_is_parsed_when_a_field_is_read():
    broken = WireCompletion.of([b"{broken"], request_id="a", engine_index=4)
    assert (broken.request_id, broken.engine_index, broken.body) == ("a", 4, b"{broken")
    completion = wire()
    assert completion.token_ids.tolist() == [1, 2, 9]
    assert completion.log_probs.tolist() == [-0.25, -0.5, -0.75]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.spans == (VersionSpan(5, 0, 3),)
    assert completion.cached_tokens == 1


def test_versions_and_log_probs_that_an_engine_does_not_return():
    meta = response_to({})["meta_info"]
    spans = [{"version": "5", "start": 0, "end": 2}, {"version": "6", "start": 2, "end": 3}]
    assert wire(meta_info={**meta, "weight_versions": spans}).spans == (VersionSpan(5, 0, 2), VersionSpan(6, 2, 3))
    assert wire(meta_info={**meta, "weight_version": "default"}).spans == (VersionSpan(-1, 0, 3),)
    del meta["output_token_logprobs"]
    assert np.isnan(wire(meta_info=meta).log_probs).all()


def test_changes_of_a_middleware_are_forwarded():
    from dataclasses import replace

    body = b'{"rid":"a","input_ids":[1],"sampling_params":{"max_new_tokens":5,"custom":1},"lora_path":"x"}'
    request = parse(body, session_id=None, read_tokens=True).requests[0]
    assert request.outgoing() == body
    shorter = replace(request, sampling=replace(request.sampling, max_new_tokens=3), seed=9, engines=(1,), priority=2)
    assert json.loads(shorter.outgoing()) == {
        "rid": "a", "input_ids": [1], "lora_path": "x", "priority": 2,
        "sampling_params": {"max_new_tokens": 3, "custom": 1, "sampling_seed": 9},
    }  # fmt: skip
    received = wire()
    cut = replace(received, token_ids=received.token_ids[:1], log_probs=received.log_probs[:1],
                  finish_reason=FinishReason.LENGTH, spans=(VersionSpan(5, 0, 1),))  # fmt: skip
    responded = json.loads(response_body(cut, received))
    # The text belongs to other tokens, so it is omitted; unchanged fields stay.
    assert "text" not in responded
    assert responded["output_ids"] == [1]
    assert responded["meta_info"]["output_token_logprobs"] == [[-0.25, 1, None]]
    assert responded["meta_info"]["finish_reason"] == {"type": "length"}
    assert responded["meta_info"]["e2e_latency"] == 0.125
