"""POST /generate of a router in front of fake engines."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from router_fake_engine import ASKED, FakeSglang, events, response_to

from slime_core.errors import EngineError
from slime_router.requests import parse
from slime_router.server.engines import Call, Engines
from slime_router.server.settings import Settings
from slime_router.server.upstreams import Upstreams


async def eventually(condition):
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not become true")


async def test_bytes_pass_unread_in_both_directions(route, engine):
    odd = b'{ "meta_info" : "no response at all, but nothing reads it", "x": 1e400 }\n'
    engine.reply = lambda body: odd
    asked = {"rid": "a", **ASKED, "image_data": ["aGk="], "custom_params": {"deep": [1, {"x": None}]}}
    async with route(engine) as router:
        status, data, headers = await router.post(asked)
    assert (status, data, headers["content-type"]) == (200, odd, "application/json")
    assert engine.seen == [asked]


async def test_a_request_without_an_id_gets_one(route, engine):
    async with route(engine) as router:
        response = await router.generate(ASKED)
    (seen,) = engine.seen
    assert {**ASKED, "rid": seen["rid"]} == seen
    assert len(seen["rid"]) == 32
    assert response == response_to(seen)


async def test_the_session_header_is_forwarded(route, engine):
    async with route(engine) as router:
        await router.generate(ASKED, headers={"X-SMG-Routing-Key": "s7", "X-Other": "1"})
    assert engine.headers[0]["x-smg-routing-key"] == "s7"
    assert "x-other" not in engine.headers[0]


async def test_upstreams_are_used_round_robin(route, engines):
    async with route(*engines) as router:
        for _ in range(4):
            await router.generate(ASKED)
    assert [len(engine.seen) for engine in engines] == [2, 2]


async def test_a_batch_is_served_in_order(route, engines):
    for engine in engines:
        engine.reply = lambda body: response_to(body, token_ids=(body["input_ids"][0], 9))
    batch = {
        "rid": "b",
        "input_ids": [[1], [2, 2], [3]],
        "sampling_params": [{"max_new_tokens": n} for n in (1, 2, 3)],
        "return_logprob": True,
    }
    async with route(*engines) as router:
        responses = await router.generate(batch)
    assert [response["output_ids"] for response in responses] == [[1, 9], [2, 9], [3, 9]]
    seen = sorted((one for engine in engines for one in engine.seen), key=lambda one: one["rid"])
    assert seen == [
        {"rid": f"b_{n}", "input_ids": ids, "sampling_params": {"max_new_tokens": n + 1}, "return_logprob": True}
        for n, ids in enumerate(([1], [2, 2], [3]))
    ]


async def test_a_batch_of_texts(route, engine):
    async with route(engine) as router:
        responses = await router.generate({"text": ["one", "two"], "rid": ["x", "y"]})
    assert [one["meta_info"]["id"] for one in responses] == ["x", "y"]
    assert sorted(one["text"] for one in engine.seen) == ["one", "two"]


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stream_passes_event_by_event(route, engine, incremental):
    engine.incremental = incremental
    engine.reply = lambda body: response_to(body, token_ids=(1, 2, 3, 9))
    async with route(engine, middlewares=["load_balance"]) as router:
        status, data, headers = await router.post({**ASKED, "stream": True})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    ids = [event["output_ids"] for event in events(data)]
    assert ids == ([[1], [2], [3], [9]] if incremental else [[1], [1, 2], [1, 2, 3], [1, 2, 3, 9]])


async def test_events_reach_the_caller_before_the_last_one_is_made(route, engine):
    engine.reply = lambda body: response_to(body, token_ids=(1, 2, 9))
    resume = asyncio.Event()

    async def slowly(request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"first":1}\n\nda')
        await resume.wait()
        await response.write(b"ta: [DONE]\n\n")
        return response

    engine.stream = slowly
    async with (
        route(engine) as router,
        router.session.post(router.url + "/generate", json={"stream": True}) as response,
    ):
        assert await asyncio.wait_for(response.content.readuntil(b"\n\n"), 60) == b'data: {"first":1}\n\n'
        resume.set()
        assert await response.content.read() == b"data: [DONE]\n\n"


async def test_a_streamed_batch_numbers_its_events(route, engine):
    def reply(body):
        response = response_to(body, token_ids=tuple(body["input_ids"]))
        response["meta_info"]["note"] = 'data: {"x": 1}'
        return response

    engine.reply = reply
    async with route(engine) as router:
        _, data, _ = await router.post({"input_ids": [[1, 2], [3, 4, 9]], "stream": True})
    assert {event["index"]: event["output_ids"] for event in events(data)} == {0: [1, 2], 1: [3, 4, 9]}
    assert {event["meta_info"]["note"] for event in events(data)} == {'data: {"x": 1}'}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_of_a_disconnected_caller_is_aborted(route, engine, stream):
    engine.hold.clear()
    async with route(engine) as router:
        task = asyncio.create_task(router.post({"rid": "gone", **ASKED, "stream": stream}))
        await eventually(lambda: engine.seen)
        task.cancel()
        await eventually(lambda: engine.aborts and engine.gone)
        assert engine.aborts == [{"rid": "gone"}]
        assert engine.gone == ["gone"]
        await eventually(lambda: not any(one.in_flight for one in router.upstreams))
        assert await router.counter('slime_router_requests_total{status="499"}') == 1
        # The router continues to serve.
        engine.hold.set()
        await router.generate(ASKED)


async def test_behind_sglang_router_aborts_are_sent_to_each_engine(route, engines):
    router_like, worker = engines
    router_like.routes = {"abort": 404, "workers": {"workers": [{"id": "w", "url": worker.url, "load": 0}], "total": 1}}
    router_like.hold.clear()
    async with route(router_like) as router:
        task = asyncio.create_task(router.post({"rid": "r1", **ASKED}))
        await eventually(lambda: router_like.seen)
        task.cancel()
        await eventually(lambda: worker.aborts)
    assert worker.aborts == [{"rid": "r1"}]


async def test_abort_request_reaches_every_upstream(route, engines):
    async with route(*engines) as router:
        status, _, _ = await router.post({"abort_all": True}, path="/abort_request")
        await eventually(lambda: all(engine.aborts for engine in engines))
    assert status == 200
    assert [engine.aborts for engine in engines] == [[{"abort_all": True}]] * 2


@pytest.mark.parametrize("asked", [{"rid": "waits"}, {"abort_all": True}])
async def test_abort_request_ends_requests_that_wait_in_a_middleware(route, engine, asked):
    engine.hold.clear()
    async with route(engine, middlewares=['{ name = "priority", concurrency = 1 }']) as router:
        first = asyncio.create_task(router.generate({"rid": "first", **ASKED}))
        await eventually(lambda: engine.seen)
        waits = asyncio.create_task(router.generate({"rid": "waits", **ASKED}))
        gauge = 'slime_router_middleware{counter="waiting",middleware="priority",place="0"}'
        while await router.counter(gauge) != 1:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.005)
        assert (await router.post(asked, path="/abort_request"))[0] == 200
        response = await asyncio.wait_for(waits, 10)
        assert (response["output_ids"], response["meta_info"]["finish_reason"]) == ([], {"type": "abort"})
        # The engine itself ends a request that it is serving.
        assert not first.done()
        engine.hold.set()
        assert (await first)["output_ids"] == [1, 2, 9]
        assert (await router.post("x", path="/abort_request"))[0] == 422
    assert [one["rid"] for one in engine.seen] == ["first"]


async def test_a_late_response_is_an_error_and_aborted(route, engine):
    engine.hold.clear()
    async with route(engine, timeout_s=0.2) as router:
        status, data, _ = await router.post({"rid": "late", **ASKED})
        await eventually(lambda: engine.aborts)
    assert (status, json.loads(data)["error"]["message"]) == (504, "no response within 0.2 s")
    assert engine.aborts == [{"rid": "late"}]


async def test_a_request_body_that_never_ends_times_out(route, engine):
    async with route(engine, timeout_s=0.2) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 504")
        writer.close()
    assert engine.seen == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"not json", "malformed"),
        (b"[]", "Expected `object`"),
        (b'{"input_ids": [1, "x"]}', "Expected `int`"),
        (b'{"input_ids": [[1], "x"]}', "Expected `array`"),
        (b'{"input_ids": [1], "sampling_params": {"n": 4}}', "send a batch"),
        (b'{"input_ids": [1], "sampling_params": {"max_new_tokens": "many"}}', "max_new_tokens"),
        (b'{"input_ids": [[1], [2]], "rid": ["a"]}', "`rid` has 1 entries for 2 sequences"),
        (b'{"text": []}', "an empty batch"),
        (b'{"text": 7}', "Expected `str | null`"),
        (b'{"input_ids": [99999999999]}', "99999999999"),
    ],
)
async def test_invalid_requests_are_refused(route, engine, body, expected):
    async with (
        route(engine, middlewares=["load_balance"]) as router,
        router.session.post(router.url + "/generate", data=body) as response,
    ):
        status, text = response.status, (await response.json())["error"]["message"]
    assert status == 400
    assert expected in text, text
    assert engine.seen == []


async def test_a_body_that_is_too_large_is_refused(route, engine):
    async with route(engine, max_body_bytes=1000) as router:
        status, data, _ = await router.post({"text": "x" * 2000})
    assert status == 413
    assert "more than 1000 bytes" in data.decode()


async def test_an_upstream_that_is_down(route, engine):
    gone = "http://127.0.0.1:9"
    async with route(gone, engine) as router:
        # An attempt marks it down; after that it gets no requests.
        await eventually(lambda: not next(iter(router.upstreams)).up)
        for upstream in router.upstreams:
            upstream.up = True
        responses = [await router.post(ASKED) for _ in range(4)]
        assert sorted(status for status, _, _ in responses) == [200, 200, 200, 503]
        refused = next(response for response in responses if response[0] == 503)
        assert b"127.0.0.1:9" in refused[1]
        assert refused[2]["retry-after"] == "1"
        _, listed = await router.get("/workers")
        assert [one["is_healthy"] for one in json.loads(listed)["workers"]] == [False, True]
        assert await router.counter('slime_router_upstream_up{url="http://127.0.0.1:9"}') == 0


async def test_a_second_attempt_skips_an_upstream_that_the_first_found_down(route, engine):
    retry = '{ name = "retry", backoff_s = 0.0 }'
    async with route("http://127.0.0.1:9", engine, middlewares=[retry]) as router:
        await eventually(lambda: not next(iter(router.upstreams)).up)
        for _ in range(2):
            next(iter(router.upstreams)).up = True
            await router.generate(ASKED)
        assert await router.counter('slime_router_middleware{counter="repeated",middleware="retry",place="0"}') == 1


async def test_a_request_is_not_sent_again_once_a_part_of_the_response_was_sent():
    settings = Settings()
    (asked,) = parse(b'{"rid": "a", "input_ids": [1]}', session_id=None, read_tokens=False).requests
    with pytest.raises(EngineError, match="a part of its response was sent already"):
        await Engines(Upstreams([], settings), settings).generate(asked, Call(stream=True, sent=True))


async def test_one_probe_that_is_late_does_not_put_an_upstream_down():
    responding = asyncio.Event()

    async def health(request):
        await responding.wait()
        return web.Response()

    async with FakeSglang(health) as slow, aiohttp.ClientSession() as session:
        upstreams = Upstreams([slow.url], Settings(health_timeout_s=0.05))
        (upstream,) = upstreams
        for up in (True, True, False, False):
            await upstreams.probe(upstream, session)
            assert upstream.up is up
        responding.set()
    # This probe has the default timeout, which a busy machine may need.
    upstreams = Upstreams([], Settings())
    async with FakeSglang() as well, aiohttp.ClientSession() as session:
        upstream.url = well.url
        await upstreams.probe(upstream, session)
        assert (upstream.up, upstream.missed) == (True, 0)
    async with aiohttp.ClientSession() as session:
        # No process listens on this port, or starts to: the probe fails at once.
        upstream.url = "http://127.0.0.1:9"
        await upstreams.probe(upstream, session)
        assert not upstream.up


async def test_an_upstream_that_is_back_is_used_again(route, engine):
    async with route(engine, health_interval_s=0.02) as router:
        (upstream,) = router.upstreams
        upstream.up = False
        await eventually(lambda: upstream.up)
        await router.generate(ASKED)


async def test_without_upstreams(route):
    async with route() as router:
        status, data, _ = await router.post(ASKED)
        health, _ = await router.get("/health")
    assert (status, health) == (503, 503)
    assert b"POST /workers adds one" in data


async def test_an_error_of_the_engine_is_passed_on(route, engine):
    engine.reply = lambda body: web.Response(status=400, body=b'{"error": {"message": "too long"}}')
    async with route(engine, middlewares=["retry"]) as router:
        status, data, _ = await router.post(ASKED)
    assert (status, data) == (400, b'{"error": {"message": "too long"}}')


@pytest.mark.parametrize("refused", [401, 403])
async def test_an_upstream_that_refuses_the_routers_token_is_not_the_callers_fault(route, engine, refused):
    engine.reply = lambda body: web.Response(status=refused, body=b'{"error": "Unauthorized"}')
    async with route(engine) as router:
        status, data, _ = await router.post(ASKED)
    assert status == 502
    message = json.loads(data)["error"]["message"]
    assert f"{engine.url} responded with status {refused}" in message
    assert "--upstream-token-file" in message
    assert len(engine.seen) == 1


@pytest.mark.parametrize(
    ("status", "headers", "again"),
    [
        (503, {}, True),
        (500, {}, False),
        # sglang-router: for an engine that it lost, and for a request that it refuses.
        (500, {"x-smg-error-code": "call_upstream_request_error"}, True),
        (500, {"x-smg-error-code": "tokenization_failed"}, False),
    ],
)
async def test_only_requests_that_are_safe_to_repeat_are_sent_again(route, engine, status, headers, again):
    replies = [web.Response(status=status, body=b"no", headers=headers), None]
    engine.reply = lambda body: replies.pop(0) or response_to(body)
    async with route(engine, middlewares=['{ name = "retry", backoff_s = 0.0 }']) as router:
        got, _, _ = await router.post(ASKED)
    assert (got, len(engine.seen)) == ((200, 2) if again else (status, 1))


@pytest.mark.parametrize("response", [b"<html>busy</html>", b"", b'{"output_ids": [1, 2', b"[1]"])
async def test_garbage_is_not_passed_on(route, engine, response):
    engine.reply = lambda body: response
    async with route(engine) as router:
        status, data, _ = await router.post(ASKED)
    assert status == 502
    assert repr(response.decode())[1:-1] in json.loads(data)["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"meta_info": {}},
        {"meta_info": {"finish_reason": {"type": "boredom"}, "output_token_logprobs": []}},
        {"output_ids": [8]},
        {"meta_info": None},
    ],
)
async def test_garbage_that_a_middleware_reads(route, engine, change, tmp_path):
    engine.reply = lambda body: {**response_to(body), **change}
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    async with route(engine, middlewares=[f'{{ name = "radix_cache", tokenizer = "{tmp_path}" }}']) as router:
        status, data, _ = await router.post({"text": "ab"})
    assert status == 502, data
    assert "no response to /generate" in json.loads(data)["error"]["message"]


TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "4": 2, "2": 3}, "unk_token": "a"},
    }
)


async def test_a_stream_that_breaks_off(route, engine):
    """Before its first event a request may be sent again. After that the error is an event, and nothing is repeated."""
    retry = '{ name = "retry", backoff_s = 0.0, attempts = 2 }'
    async with route(engine, middlewares=[retry]) as router:
        engine.break_stream_after = 0
        status, data, _ = await router.post({**ASKED, "stream": True})
        assert (status, len(engine.seen)) == (503, 2)
        engine.break_stream_after = 2
        status, data, _ = await router.post({**ASKED, "stream": True})
        assert (status, len(engine.seen)) == (200, 3)
    *shown, last = events(data)
    assert [event["output_ids"] for event in shown] == [[1], [1, 2]]
    assert last["error"]["code"] == 502
    assert "within the stream" in last["error"]["message"]


async def test_requests_above_the_limit_are_refused(route, engine):
    engine.hold.clear()
    async with route(engine, max_in_flight=2) as router:
        first = [asyncio.create_task(router.post(ASKED)) for _ in range(2)]
        await eventually(lambda: len(engine.seen) == 2)
        status, _, headers = await router.post(ASKED)
        assert (status, headers["retry-after"]) == (503, "1")
        engine.hold.set()
        assert [(await task)[0] for task in first] == [200, 200]
        await router.generate(ASKED)


async def test_the_token(route, engine):
    async with route(engine, token="s3cret", upstream_token="other") as router:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            status, data, responded = await router.post(ASKED, headers=headers)
            assert (status, responded["www-authenticate"]) == (401, "Bearer")
            assert b"s3cret" not in data
            assert (await router.get("/workers", headers=headers))[0] == 401
            assert (await router.get("/metrics", headers=headers))[0] == 401
        assert engine.seen == []
        assert (await router.get("/health"))[0] == 200
        await router.generate(ASKED, headers={"authorization": "Bearer s3cret"})
    assert engine.headers[0]["authorization"] == "Bearer other"


async def test_workers_are_added_and_removed_in_sglang_routers_form(route, engines):
    one, other = engines
    async with route(one) as router:
        status, data, headers = await router.post({"url": other.url + "/", "worker_type": "regular"}, path="/workers")
        added = json.loads(data)
        assert (status, added["status"], added["url"]) == (202, "accepted", other.url)
        assert headers["location"] == added["location"] == f"/workers/{added['worker_id']}"
        # Adding it again changes nothing.
        await router.post({"url": other.url}, path="/workers")
        listed = json.loads((await router.get("/workers"))[1])
        assert (listed["total"], [worker["url"] for worker in listed["workers"]]) == (2, [one.url, other.url])
        first = listed["workers"][0]
        assert json.loads((await router.get(f"/workers/{first['id']}"))[1]) == first
        async with router.session.delete(f"{router.url}/workers/{first['id']}") as response:
            assert (response.status, await response.json()) == (202, {"status": "accepted", "worker_id": first["id"]})
        for _ in range(3):
            await router.generate(ASKED)
        assert (len(one.seen), len(other.seen)) == (0, 3)
        async with router.session.delete(f"{router.url}/workers/{first['id']}") as response:
            assert response.status == 404
        assert (await router.post({"address": "x"}, path="/workers"))[0] == 422
        assert (await router.post({"url": "127.0.0.1:80"}, path="/workers"))[0] == 422


async def test_the_upstreams_connections_are_used_again(route, engine, monkeypatch):
    monkeypatch.setattr("slime_router.server.engines.KEEPALIVE_S", 600.0)
    async with route(engine) as router:
        for _ in range(8):
            await router.generate(ASKED)
    # One connection, and a second if a probe was using the first.
    assert len(engine.peers) <= 2
