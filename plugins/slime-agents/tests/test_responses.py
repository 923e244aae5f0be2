"""OpenAI's responses API, with the real client; its package's types are the oracle of what it sends."""

import json

import anthropic
import openai
import pytest
from agents_played import CHAT, pieces, play, returning, user
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import ConfigDict, TypeAdapter, create_model

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ASKS = '<tool_call>\n{"arguments":  {"a":1,"b": 2}, "name": "add"}\n</tool_call>'
STREAM_EVENT = TypeAdapter(ResponseStreamEvent)
STRICT = create_model("Strict", __base__=Response, __config__=ConfigDict(extra="forbid"))


def connected(task):
    return openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)


def checked(response):
    """With every field that the package's types require, and none that they do not know."""
    STRICT.model_validate(response.model_dump(exclude_unset=True))
    return response


def sums(response):
    """The outputs of all calls in a response."""
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": str(sum(json.loads(item.arguments).values())),
        }
        for item in response.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_tool_loop_is_one_sample_whether_or_not_responses_are_stored(is_stored):
    seen = []

    async def calculator(task):
        options = {"model": task.model, "instructions": "You add.", "tools": [ADD], "store": is_stored}
        async with connected(task) as opened:
            given = [user(task.prompt)]
            first = checked(await opened.responses.create(input=given, **options))
            results = sums(first)
            if is_stored:
                options["previous_response_id"] = first.id
                given = results
            else:
                given += [item.model_dump(exclude_none=True) for item in first.output] + results
            seen.extend([first, checked(await opened.responses.create(input=given, **options))])

    reply = f"I ask.\n{ASKS}"
    [sample], engine = play(returning(calculator, 1.0), lambda text: "It is 3." if "<tool_response>" in text else reply)
    assert [item.type for item in seen[0].output] == ["message", "function_call"]
    assert (seen[0].output_text, seen[0].status, seen[0].model) == ("I ask.", "completed", "slime")
    assert json.loads(seen[0].output[1].arguments) == {"a": 1, "b": 2}
    assert (seen[1].output_text, seen[1].previous_response_id) == ("It is 3.", seen[0].id if is_stored else None)
    assert pieces(sample) == [
        (1, f"{reply}<e>"),
        (0, "\n<s>user\n<tool_response>\n3\n</tool_response><e>\n<s>assistant\n"),
        (1, "It is 3.<e>"),
    ]
    # The oracle: transformers, the whole conversation at once, without the newline after its end.
    function = {name: ADD[name] for name in ("name", "description", "parameters")}
    conversation = [
        {"role": "system", "content": "You add."}, user("6*7="), {"role": "assistant", "content": reply},
        {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."},
    ]  # fmt: skip
    tools = [{"type": "function", "function": function}]
    assert sample.tokens.tolist() == CHAT.apply_chat_template(conversation, tools=tools, return_dict=False)[:-1]
    usage = seen[1].usage
    assert (usage.input_tokens, usage.output_tokens) == (len(engine.requests[1].token_ids), len("It is 3.") + 1)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_stream_has_the_events_of_the_types_in_their_order():
    lines, streamed = [], []

    async def streams(task):
        options = {"model": "m", "input": "go", "tools": [ADD], "include": ["message.output_text.logprobs"]}
        async with connected(task) as opened:
            async with opened.responses.with_streaming_response.create(**options, stream=True) as raw:
                lines.extend([line async for line in raw.iter_lines()])
            async with opened.responses.stream(**options) as stream:
                streamed.extend([event async for event in stream])
                streamed.append(await stream.get_final_response())

    _, engine = play(returning(streams, 1.0), lambda text: f"I ask.\n{ASKS}")
    sent = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == [e["type"] for e in sent]
    for number, event in enumerate(sent):
        STREAM_EVENT.validate_python(event)
        assert event["sequence_number"] == number
    assert [event["type"].removeprefix("response.") for event in sent] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    rows = sent[4]["logprobs"]
    assert "".join(row["token"] for row in rows) == f"I ask.\n{ASKS}<e>"
    assert [row["logprob"] for row in rows] == pytest.approx(engine.completions[0].log_probs.tolist())
    final = streamed[-1]
    assert (final.output_text, final.output[1].name) == ("I ask.", "add")


def test_limits_and_ids_of_responses():
    read = []

    async def asks(task):
        async with connected(task) as opened:
            read.append(checked(await opened.responses.create(model="m", input="hi", max_output_tokens=2)))
            # A reference to an item instead of the item.
            items = [user("hi"), {"type": "item_reference", "id": read[0].output[0].id}, user("on")]
            read.append(checked(await opened.responses.create(model="m", input=items, store=False)))
            for response in ("resp_1", "resp_7"):
                with pytest.raises(openai.BadRequestError, match="there is no such response in this episode") as error:
                    await opened.responses.create(model="m", input="so", previous_response_id=response)
                read.append(error.value.param)
            async with opened.responses.stream(model="m", input="hi", max_output_tokens=2) as stream:
                read.extend([event.type async for event in stream][-1:])

    samples, engine = play(returning(asks, 1.0), lambda text: "hello")
    assert (read[0].status, read[0].incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (read[0].output[0].status, read[0].output_text) == ("incomplete", "he")
    assert read[2:] == ["previous_response_id"] * 2 + ["response.incomplete"]
    assert (
        CHAT.decode(engine.requests[1].token_ids)
        == "<s>user\nhi<e>\n<s>assistant\nhe<e>\n<s>user\non<e>\n<s>assistant\n"
    )
    assert len(samples) == 2


def test_tokens_are_counted_as_a_call_has_them():
    counted, used = [], []

    async def counts(task):
        tools = [{"name": "add", "description": "Adds.", "input_schema": ADD["parameters"]}]
        async with anthropic.AsyncAnthropic(base_url=task.anthropic_url, api_key=task.api_key, max_retries=0) as opened:
            messages = [user("hi")]
            for _ in range(2):
                options = {"model": "m", "system": "Add.", "messages": messages, "tools": tools}
                counted.append((await opened.messages.count_tokens(**options)).input_tokens)
                message = await opened.messages.create(**options, max_tokens=90)
                used.append(message.usage.input_tokens)
                messages = [*messages, {"role": "assistant", "content": message.content}, user("on")]
            with pytest.raises(anthropic.BadRequestError, match="messages: there are none"):
                await opened.messages.count_tokens(model="m", messages=[])

    # Half of the call is written with spaces that a parsed one would not have.
    [sample], engine = play(returning(counts, 1.0), lambda text: ASKS, config={"max_calls": 2})
    assert counted == used == [len(request.token_ids) for request in engine.requests]
    assert sample.counts["agent_answers"] == 2
