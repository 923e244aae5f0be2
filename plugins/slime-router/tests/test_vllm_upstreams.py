"""Servers of vLLM behind the router: requests in SGLang's form, as callers send them, responses in the same form."""

import asyncio
import json

import pytest
from router_fake_engine import ASKED, FakeSglang


class FakeVllm(FakeSglang):
    """Responds in the form of vLLM 0.32."""

    generate_path, abort_path = "/inference/v1/generate", "/abort_requests"

    def __init__(self):
        super().__init__()
        self.reply = response_to


def response_to(body):
    tokens = [1, 2, 9]
    content = [{"token_id": token, "logprob": -0.25 * token, "rank": 1, "top_logprobs": []} for token in tokens]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": tokens,
        "weight_versions": [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}],
        "logprobs": {"content": content} if "logprobs" in body["sampling_params"] else None,
    }
    return {"request_id": f"generate-tokens-{body['request_id']}", "choices": [choice], "metrics": None}


@pytest.fixture
async def vllm():
    async with FakeVllm() as one:
        yield one


async def test_a_request_and_its_response_are_converted(vllm, route):
    params = {"max_new_tokens": 8, "top_k": -1, "sampling_seed": 3, "no_stop_trim": True, "structural_tag": "{}"}
    async with route(vllm, program="vllm") as router:
        response = await router.generate({**ASKED, "rid": "a", "priority": 2, "sampling_params": params})
        await router.generate({"rid": "b", "input_ids": [5]})
    sent, plain = vllm.seen
    assert sent == {
        "request_id": "a",
        "token_ids": [5, 6, 7],
        "sampling_params": {
            "max_tokens": 8,
            "top_k": -1,
            "seed": 3,
            "include_stop_str_in_output": True,
            "structured_outputs": {"structural_tag": "{}"},
            "logprobs": 0,
        },
        "stream": False,
        "priority": -2,
    }
    assert plain["sampling_params"] == {"max_tokens": 128}
    assert response["output_ids"] == [1, 2, 9]
    meta = response["meta_info"]
    assert (meta["id"], meta["finish_reason"], meta["weight_version"]) == ("a", {"type": "stop"}, "5")
    assert meta["output_token_logprobs"] == [[-0.25, 1, None], [-0.5, 2, None], [-2.25, 9, None]]


async def test_middlewares_read_its_responses(vllm, route, tmp_path):
    record = f'{{ name = "record", path = "{tmp_path}/r", mode = "record" }}'
    async with (
        FakeVllm() as other,
        route(vllm, other, program="vllm", middlewares=["session_affinity", record]) as router,
    ):
        for number in range(4):
            await router.generate({**ASKED, "rid": f"r{number}"}, headers={"x-smg-routing-key": "one"})
        counts = sorted(len(one.seen) for one in (vllm, other))
    assert counts == [0, 4]
    assert any(tmp_path.iterdir())


async def until(happened):
    while not happened():  # noqa: ASYNC110 - the fake server has no event for it
        await asyncio.sleep(0.005)


async def test_aborts_and_callers_that_leave_reach_vllm(vllm, route):
    vllm.hold.clear()
    async with route(vllm, program="vllm") as router:
        left = asyncio.create_task(router.post({**ASKED, "rid": "left"}))
        await until(lambda: vllm.seen)
        left.cancel()
        await until(lambda: vllm.aborts)
        await router.post({"rid": "x"}, path="/abort_request")
        await router.post({"abort_all": True}, path="/abort_request")
        await until(lambda: len(vllm.aborts) >= 3)
    assert vllm.aborts[0] == {"request_ids": ["generate-tokens-left"]}
    assert [abort for abort in vllm.aborts if abort not in vllm.aborts[:1]] == [
        {"request_ids": ["generate-tokens-x"]},
        {},
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stream": True}, "no streams with --program vllm"),
        ({"image_data": ["x"]}, "not served by vLLM behind this router: image_data"),
        ({"sampling_params": {"min_p_typical": 1}}, "sampling_params.min_p_typical"),
        ({"input_ids": None, "text": "hello"}, "send input_ids"),
    ],
)
async def test_what_vllm_does_not_serve_is_refused(change, text, vllm, route):
    async with route(vllm, program="vllm") as router:
        status, data, _ = await router.post({**ASKED, **change})
    assert status == 400
    assert text in data.decode()
    assert vllm.seen == []


async def test_a_response_of_another_program_is_an_error(vllm, route):
    vllm.reply = lambda body: {"output_ids": [1]}
    async with route(vllm, program="vllm") as router:
        status, data, _ = await router.post(ASKED)
    assert status == 502
    assert "no response of vLLM: KeyError" in json.loads(data)["error"]["message"]
