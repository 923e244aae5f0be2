"""Parameters of calls: each is used, has no effect on a response, or is refused by name. Raw requests to the server, with what
clients of OpenAI and Anthropic may send."""

import asyncio
import inspect
import json

import anthropic
import httpx
import openai
import pytest
from agents_speaker import Speaker, episode_with
from openai.resources.responses import AsyncResponses

from slime_agents.control_tokens import ControlTokens
from slime_agents.served import anthropic_api, openai_api, responses_api
from slime_agents.served import server as servers
from slime_agents.served.server import AgentServer
from slime_agents.served.session import Session

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def server(loop):
    made = AgentServer()
    yield made
    loop.run(made.close())


@pytest.fixture
def post(loop, server):
    """`post(path, body, ...)` gives the status and the JSON of the response, from an episode of its own."""

    def call(path, body, *, reply="ok", max_calls=64, ignored=(), method="POST"):
        async def scene():
            episode = episode_with(Speaker(lambda text: reply))
            settings = {
                "max_calls": max_calls,
                "fork_threshold": 8,
                "template_kwargs": {},
                "ignored_parameters": ignored,
            }
            session = Session(episode, ControlTokens(episode.tokenizer), **settings)
            key = await server.open(session)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with httpx.AsyncClient(base_url=server.url, timeout=60, verify=False) as client:
                response = await client.request(method, path, content=data, headers={"authorization": f"Bearer {key}"})
            server.drop(key)
            return response.status_code, response.json()

        return loop.run(scene())

    return call


def asked(path=CHAT, **more):
    messages = [{"role": "user", "content": "hi"}]
    return (
        {"model": "m", "input": messages, **more} if path == RESPONSES else {"model": "m", "messages": messages, **more}
    )


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "g"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "parameter", "value", "advice"),
    [
        (
            CHAT,
            "tool_choice",
            "required",
            '"auto" and "none" are supported. The engine: scripted engine: it has no guided',
        ),
        (CHAT, "tool_choice", NAMED, '"auto" and "none" are supported'),
        (CHAT, "tool_choice", {"type": "allowed_tools"}, 'There are "auto", "none", "required" and a function'),
        (CHAT, "response_format", {"type": "json_object"}, "Describe the format in a message"),
        (CHAT, "response_format", SCHEMA, "Describe the format"),
        (CHAT, "temperature", 0.3, "A call is sampled as the run samples, with temperature = 1.0"),
        (CHAT, "top_p", 0.5, "with top_p = 1.0"),
        (CHAT, "seed", 1, "the run's rollout_seed"),
        (CHAT, "logit_bias", {"5": 100}, "The model writes freely"),
        (CHAT, "frequency_penalty", 0.5, "The model writes freely"),
        (CHAT, "presence_penalty", -0.5, "The model writes freely"),
        (CHAT, "top_logprobs", 3, "Only the sampled token's log-prob is known"),
        (CHAT, "parallel_tool_calls", False, "Use the first call"),
        (CHAT, "reasoning_effort", "high", "generate.chat_template_kwargs"),
        (CHAT, "functions", [{}], "Use tools"),
        (
            CHAT,
            "best_of",
            4,
            "Supported are logprobs, max_completion_tokens, max_tokens, messages, n, parallel_tool_calls, response_format,",
        ),
        (MESSAGES, "tool_choice", {"type": "any"}, "Without guided decoding"),
        (MESSAGES, "tool_choice", {"type": "tool", "name": "f"}, "Without guided decoding"),
        (MESSAGES, "tool_choice", {"type": "auto", "disable_parallel_tool_use": True}, "Use the first call"),
        (MESSAGES, "thinking", {"type": "enabled", "budget_tokens": 2000}, "generate.chat_template_kwargs"),
        (MESSAGES, "temperature", 0, "with temperature = 1.0"),
        (MESSAGES, "top_k", 5, "with top_k = -1"),
        (MESSAGES, "mcp_servers", [{}], "Supported are max_tokens, messages, stop_sequences"),
        (RESPONSES, "tool_choice", "required", "Without guided decoding"),
        (RESPONSES, "tool_choice", {"type": "function", "name": "f"}, "Without guided decoding"),
        (RESPONSES, "text", {"format": {"type": "json_object"}}, "Describe the format in a message"),
        (RESPONSES, "text", {"verbosity": "low"}, "Describe the format in a message"),
        (RESPONSES, "include", ["file_search_call.results"], "Supported are message.output_text.logprobs, reasoning"),
        (RESPONSES, "reasoning", {"effort": "high"}, "generate.chat_template_kwargs"),
        (RESPONSES, "temperature", 0.3, "with temperature = 1.0"),
        (RESPONSES, "background", True, "A response is there when the call returns"),
        (RESPONSES, "conversation", "conv_1", "Use previous_response_id"),
        (RESPONSES, "truncation", "auto", "Remove what is too long"),
        (RESPONSES, "top_logprobs", 3, "Only the sampled token's log-prob is known"),
        (RESPONSES, "parallel_tool_calls", False, "Use the first call"),
    ],
)
def test_what_would_not_be_respected_is_refused_by_name(post, path, parameter, value, advice):
    tool = {CHAT: TOOL, MESSAGES: {"name": "f", "input_schema": {}}, RESPONSES: {"type": "function", "name": "f"}}[path]
    body = asked(
        path, **{"max_output_tokens" if path == RESPONSES else "max_tokens": 9, "tools": [tool], parameter: value}
    )
    status, response = post(path, body)
    text = response["error"]["message"]
    assert status == 400
    assert text.startswith(f"{parameter} = ")
    assert advice in text
    assert text.endswith(f'accept in the run file that it is ignored: generate.ignored_parameters = ["{parameter}"].')
    if path != MESSAGES:
        assert response["error"]["param"] == parameter
    status, response = post(path, body, ignored=[parameter])
    assert status == 200, response


def test_values_that_ask_for_what_is_done_are_accepted(post):
    defaults = {name: values[0] for name, values in openai_api.PARAMETERS.defaults.items()}
    labels = dict.fromkeys(openai_api.PARAMETERS.no_effect, "x")
    options = {"temperature": 1, "top_p": 1, "seed": None, "tool_choice": "auto", "tools": [TOOL]}
    status, response = post(CHAT, asked(**{**labels, **defaults, **options}, stream_options={"include_usage": True}))
    assert (status, response["choices"][0]["message"]["content"]) == (200, "ok")
    defaults = {name: values[0] for name, values in responses_api.PARAMETERS.defaults.items()}
    labels = dict.fromkeys(responses_api.PARAMETERS.no_effect, "x")
    options = {
        "temperature": 1,
        "tool_choice": "none",
        "text": responses_api.PLAIN,
        "include": ["reasoning.encrypted_content"],
    }
    status, response = post(
        RESPONSES, asked(RESPONSES, **{**labels, **defaults, **options}, stream_options={"include_obfuscation": False})
    )
    assert (status, response["output"][0]["content"][0]["text"]) == (200, "ok")
    labels = dict.fromkeys(anthropic_api.PARAMETERS.no_effect, "x")
    choice = {"type": "none", "disable_parallel_tool_use": False}
    options = {"thinking": {"type": "disabled"}, "temperature": 1.0, "tool_choice": choice}
    status, response = post(MESSAGES, asked(**{**labels, **options}))
    assert (status, response["content"][0]["text"]) == (200, "ok")


@pytest.mark.parametrize(
    ("create", "parameters"),
    [
        (openai.resources.chat.AsyncCompletions.create, openai_api.PARAMETERS),
        (AsyncResponses.create, responses_api.PARAMETERS),
        (anthropic.resources.AsyncMessages.create, anthropic_api.PARAMETERS),
    ],
)
def test_every_parameter_of_the_clients_is_known_or_refused(create, parameters):
    names = set(inspect.signature(create).parameters) - {"self"}
    names -= {name for name in names if name.startswith("extra_")} | {"timeout"}
    assert parameters.used <= names | {"skip_special_tokens"}
    # A new name in a client is refused until it is classified here.
    for name in names - parameters.used - parameters.no_effect - set(parameters.defaults):
        with pytest.raises(Exception, match=f"{name} = 'x': not supported here"):
            parameters.check({name: "x"}, episode_with(Speaker(str)).sampling, ())


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (CHAT, b"\xff\xfe", 400, "Invalid JSON"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, "invalid unicode code point"),
        (CHAT, b'{"messages": ' + b"[" * 9000 + b"]" * 9000 + b"}", 400, "recursion limit exceeded"),
        (CHAT, asked(stop=""), 400, "stop"),
        (
            CHAT,
            asked(tool_choice="required"),
            400,
            "tool_choice = 'required': there is no such tool. The call has no tools",
        ),
        (CHAT, asked(tool_choice=NAMED, tools=[OTHER]), 400, "there is no such tool. The call has g"),
        (
            CHAT,
            asked(response_format={"type": "grammar"}),
            400,
            "type 'grammar': there are text, json_object and json_schema",
        ),
        (CHAT, asked(response_format={"type": "json_schema"}), 400, "response_format: None is no JSON schema"),
        (CHAT, asked(n=9), 400, "n = 9: the agent may call 3 times (max_calls)"),
        (
            CHAT,
            asked(stream_options={"continuous_usage_stats": True}),
            400,
            "stream_options: continuous_usage_stats: not",
        ),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "tool_calls: 5: must be a list of objects"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, 400, "tool_calls: ['x']: must be a list of"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "content: 5: must be a string or a list of parts"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": ["x"]}]},
            400,
            "content: ['x']: must be a string or a list",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": 5}]},
            400,
            "content: 5: must be a string or a list of blocks",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "assistant", "content": "I"}]},
            400,
            "a response that was begun is not continued",
        ),
        ("/v1/embeddings", {}, 404, "POST /v1/embeddings is not served here. There are POST /v1/chat/completions"),
        ("/v1/messages/count_tokens", {"messages": []}, 400, "messages: there are none"),
        (RESPONSES, {}, 400, "input: Field required"),
        (RESPONSES, {"input": []}, 400, "messages: there are none"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, 400, "items of type computer_call cannot be shown"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, 400, "are no JSON"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_7"}]}, 400, "item_reference 'msg_7': there is no"),
        (RESPONSES, {"input": "hi", "tools": [{"type": "web_search"}]}, 400, "tools: web_search: tools that a server"),
        (RESPONSES, {"input": "hi", "stream_options": {"x": 1}}, 400, "stream_options: x: not supported here"),
        (
            RESPONSES,
            {"input": "hi", "previous_response_id": "resp_9"},
            400,
            'previous_response_id = "resp_9": there is no such response in this episode. Responses are stored unless',
        ),
    ],
)
def test_requests_that_are_no_calls(post, path, body, status, text):
    found, response = post(path, body, max_calls=3)
    assert found == status
    assert text in response["error"]["message"]


@pytest.mark.parametrize("depth", [900, 100_000])
def test_arguments_that_are_nested_too_deeply(post, depth):
    deep = {"name": "f", "arguments": '{"a":' + "[" * depth + "]" * depth + "}"}
    status, response = post(CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": deep}]}]})
    assert status == 400
    assert "tool_calls: arguments are no JSON: recursion limit exceeded" in response["error"]["message"]


def test_a_request_that_is_too_large_is_refused_before_it_is_read(post, monkeypatch):
    monkeypatch.setattr(servers, "LARGEST_BODY", 2**20)
    status, response = post(CHAT, b" " * (2**20 + 1))
    assert (status, response["error"]["message"]) == (413, "the request has more than 1 MiB: shorten its messages")
    assert response["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": {"a": ' + "[" * 1500 + "]" * 1500 + "}}",
        '{"name": "f", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}",
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
        '["f"]',
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_calls_of_the_model_that_json_cannot_hold_are_text(post, path, written):
    text = f"<tool_call>{written}</tool_call>"
    tools = [TOOL] if path == CHAT else [{"name": "f", "input_schema": {}}]
    status, response = post(path, asked(tools=tools), reply=text)
    assert status == 200, response


def test_many_beginnings_of_calls_take_no_long_time():
    from slime_agents.served.dialogue import written_calls

    # With a pattern that looks for an end from every beginning, this takes hours.
    assert written_calls("<tool_call>{" * 200_000) == []
    assert written_calls("<tool_call>{" * 100_000 + "}</tool_call>" * 100_000)[0].endswith("{}")
    nested = '<tool_call> {"a": "</tool_call>"}\n</tool_call> <tool_call>{}</tool_call><tool_call>{</tool_call>'
    assert written_calls(nested) == ['{"a": "</tool_call>"}', "{}"]
