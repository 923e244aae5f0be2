"""Agents with the real clients of OpenAI and Anthropic, at a server of slime's."""

import asyncio
import json
import re
import sys
import threading
from dataclasses import replace

import anthropic
import numpy as np
import openai
import pytest
from agents_played import CHAT, HERMES, pieces, play, returning, user
from agents_speaker import Speaker, episode_with

from slime_agents.config import AgentConfig, CommandConfig
from slime_agents.plugin import OpenaiAgent
from slime_agents.served.agents import Agent, AgentFailed, AgentTask, Earned, FunctionAgent
from slime_agents.served.dialogue import written_calls
from slime_agents.served.generator import ServedAgent
from slime_agents.served.server import AgentServer
from slime_core.errors import EngineError, PluginError
from slime_core.registry.plugin_file import PluginFile
from slime_core.types.completion import SamplingParams
from slime_core.types.sample import Status, VersionSpan
from slime_models.new_model import character_tokenizer

SPECIALS = ["<s>", "<e>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ASKS = '<tool_call>\n{"arguments":  {"a":1,"b": 2}, "name": "add"}\n</tool_call>'


class Chat(Speaker):
    tokenizer = CHAT


def client(task, **options):
    return openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0, **options)


async def ask(task, *messages, **options):
    async with client(task) as opened:
        response = await opened.chat.completions.create(model="slime", messages=list(messages), **options)
    return response.choices[0].message


def test_a_tool_loop_is_one_sample_of_the_templates_tokens():
    seen = []

    async def calculator(task):
        tools = [{"type": "function", "function": ADD}]
        messages = [{"role": "system", "content": "You add."}, user(task.prompt)]
        while True:
            message = await ask(task, *messages, tools=tools)
            seen.append(message)
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                total = str(sum(json.loads(call.function.arguments).values()))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": total})

    [sample], engine = play(calculator, lambda text: "It is 3." if "<tool_response>" in text else f"I ask.\n{ASKS}")
    assert seen[0].content == "I ask."
    assert json.loads(seen[0].tool_calls[0].function.arguments) == {"a": 1, "b": 2}
    # The model's own spelling of the call, blanks and order included, is what it sees again.
    assert pieces(sample) == [
        (1, f"I ask.\n{ASKS}<e>"),
        (0, "\n<s>user\n<tool_response>\n3\n</tool_response><e>\n<s>assistant\n"),
        (1, "It is 3.<e>"),
    ]
    assert sample.status is Status.COMPLETED
    assert sample.counts == {"agent_answers": 2, "agent_realigned": 0, "agent_constrained": 0}
    conversation = [
        {"role": "system", "content": "You add."}, user("6*7="), {"role": "assistant", "content": f"I ask.\n{ASKS}"},
        {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."},
    ]  # fmt: skip
    tools = [{"type": "function", "function": ADD}]
    # The oracle: transformers, the whole conversation at once, without the newline after its end.
    whole = CHAT.apply_chat_template(conversation, tools=tools, return_dict=False)
    assert sample.tokens.tolist() == whole[:-1]
    first = CHAT.apply_chat_template(conversation[:2], tools=tools, add_generation_prompt=True, return_dict=False)
    assert engine.requests[0].token_ids.tolist() == first
    assert not sample.rollout_log_probs[sample.loss_mask == 0].any()
    assert (sample.rollout_log_probs[sample.loss_mask == 1] < 0).all()


def test_branches_share_a_rollout_and_a_reward():
    async def tree(task):
        first = await ask(task, user("hi"))
        begun = [user("hi"), {"role": "assistant", "content": first.content}]
        await ask(task, *begun, user("one"))
        await ask(task, *begun, user("two"))

    async def scorer(group):
        assert len(group.samples) == 1
        return replace(group, samples=(replace(group.samples[0], reward=0.75),))

    samples, _ = play(tree, lambda text: f"text {text.count('<s>')}", scorer=scorer)
    assert [pieces(sample)[-1] for sample in samples] == [(1, "text 4<e>"), (1, "text 4<e>")]
    assert [sample.num_trainable for sample in samples] == [14, 7]
    assert {sample.rollout_id for sample in samples} == {12}
    assert [sample.reward for sample in samples] == [0.75, 0.75]
    assert CHAT.decode(samples[1].prompt.token_ids).endswith("two<e>\n<s>assistant\n")
    [last], _ = play(tree, lambda text: "x", evaluation=True)
    assert "two" in last.prompt.text
    rewarded, _ = play(returning(tree, 0.5), lambda text: "x")
    assert [sample.reward for sample in rewarded] == [0.5, 0.5]


def test_several_responses_at_once_and_streams():
    read, streamed = [], []

    async def many(task):
        async with client(task) as opened:
            response = await opened.chat.completions.create(
                model="m", messages=[user("hi")], n=3, logprobs=True, temperature=1
            )
            read.append([choice.message.content for choice in response.choices])
            read.append(response.choices[0].logprobs.content[0])
            read.append(
                (response.usage.prompt_tokens, response.usage.completion_tokens, response.choices[0].finish_reason)
            )
            options = {"stream": True, "tools": [{"type": "function", "function": ADD}], "logprobs": True}
            stream = await opened.chat.completions.create(model="m", messages=[user("go")], **options)
            chunks = [chunk.choices[0] async for chunk in stream]
            read.extend(call.function.name for chunk in chunks for call in chunk.delta.tool_calls or [])
            streamed.extend(row for chunk in chunks if chunk.logprobs for row in chunk.logprobs.content)
            read.append([model.id async for model in opened.models.list()])
        return 1.0

    samples, engine = play(many, lambda text: ASKS if "go" in text else "abc")
    assert read[0] == ["abc"] * 3
    assert (read[1].token, read[1].logprob < 0) == ("a", True)
    assert read[2] == (len("<s>user\nhi<e>\n<s>assistant\n") - 4 - 2, 3 * 4, "stop")
    assert read[3:] == ["add", ["slime"]]
    assert "".join(row.token for row in streamed) == f"{ASKS}<e>"
    assert [row.logprob for row in streamed] == pytest.approx(engine.completions[-1].log_probs.tolist())
    assert bytes(byte for row in streamed for byte in row.bytes).decode() == f"{ASKS}<e>"
    assert len(samples) == 4
    assert {request.sampling.temperature for request in engine.requests} == {1.0}
    assert len({request.seed for request in engine.requests}) == 4


# Some tokenizers declare as special what is parsed.
SPECIAL = character_tokenizer("".join(map(chr, range(32, 127))) + "\n", SPECIALS)
SPECIAL.add_special_tokens({"additional_special_tokens": SPECIALS})
SPECIAL.eos_token = "<e>"
SPECIAL.chat_template = HERMES


def test_a_response_is_read_without_special_tokens_and_rendered_with_them():
    read, shown = [], []

    async def asks_twice(task):
        messages = [user("hi")]
        for text in ("on", "go", "so"):
            async with client(task) as opened:
                response = await opened.chat.completions.create(model="m", messages=messages, logprobs=True)
            read.append(response.choices[0].message.content)
            shown.append("".join(row.token for row in response.choices[0].logprobs.content))
            messages += [response.choices[0].message.model_dump(exclude_none=True), user(text)]
        # The agent forgets the beginning.
        await ask(task, *messages[2:])
        await ask(task, *messages[2:], user("on"))
        return 1.0

    replies = iter(["4<pad>2", "<s>42", "<pad>42", "x", "y"])
    samples, engine = play(asks_twice, lambda text: next(replies), tokenizer=SPECIAL)
    assert read == ["42"] * 3
    assert shown == ["4<pad>2<e>", "<s>42<e>", "<pad>42<e>"]
    between = [(0, f"\n<s>user\n{text}<e>\n<s>assistant\n") for text in ("on", "go")]
    assert pieces(samples[0], SPECIAL) == [(1, shown[0]), between[0], (1, shown[1]), between[1], (1, shown[2])]
    assert samples[0].response == "42\nuser\non\nassistant\n42\nuser\ngo\nassistant\n42"
    for request in engine.requests[3:]:
        text = SPECIAL.decode(request.token_ids)
        assert text.startswith("<s>user\non<e>\n<s>assistant\n<s>42<e>\n<s>user\ngo<e>\n<s>assistant\n<pad>42<e>\n")


def test_threads_with_the_same_text_are_rendered_as_each_wrote_it():
    class Pair(Agent):
        async def run(self, task):
            for turn in range(2):
                for name in ("one", "other"):
                    task.name_thread(name)
                    messages = [user("hi"), {"role": "assistant", "content": "42"}, user("on")][: 1 + 2 * turn]
                    async with client(task, default_headers={"X-Session-ID": name}) as opened:
                        await opened.chat.completions.create(model="m", messages=messages)
            return 1.0

    async def scene():
        replies = iter(["4<pad>2", "42<pad>", "x", "y"])
        generator = ServedAgent(Pair(), AgentConfig())
        engine = Speaker(lambda text: next(replies), tokenizer=SPECIAL)
        try:
            return await generator.generate(episode_with(engine, tokenizer=SPECIAL))
        finally:
            await generator.close()

    written = [(pieces(sample, SPECIAL)[0][1], len(pieces(sample, SPECIAL))) for sample in asyncio.run(scene())]
    assert written == [("4<pad>2<e>", 3), ("42<pad><e>", 3)]


@pytest.mark.parametrize("tokenizer", [CHAT, SPECIAL])
def test_tags_are_parsed_whether_or_not_they_are_special(tokenizer):
    read = []

    async def every_way(task):
        options = {"model": "m", "messages": [user("hi")]}
        tools = [{"type": "function", "function": ADD}]
        async with client(task) as opened:
            whole = {"skip_special_tokens": False}
            for more in ({"tools": tools}, {"tools": tools, "extra_body": whole}, {}):
                response = await opened.chat.completions.create(**options, **more)
                read.append(response.choices[0].message)
            stream = await opened.chat.completions.create(**options, tools=tools, stream=True)
            chunks = [chunk async for chunk in stream]
            read.append(chunks[0].choices[0].delta)
        async with anthropic.AsyncAnthropic(base_url=task.anthropic_url, api_key=task.api_key, max_retries=0) as opened:
            tools = [{"name": "add", "input_schema": ADD["parameters"]}]
            read.append(await opened.messages.create(**options, max_tokens=300, tools=tools))

    play(returning(every_way, 1.0), lambda text: f"<think>I<pad> ask.</think>{ASKS}<pad>", tokenizer=tokenizer)
    for message in (*read[:2], read[3]):
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
    thought = "<think>I ask.</think>"
    assert (read[0].content, read[3].content, read[4].content[0].text) == (thought, thought, thought)
    assert read[1].content == "<think>I<pad> ask.</think>"
    # Without tools nothing is parsed, and the tags of calls are special tokens as any other.
    call = ASKS if tokenizer is CHAT else ASKS.replace("<tool_call>", "").replace("</tool_call>", "")
    assert read[2].content == thought + call


class Guided(Speaker):
    guided = True


def test_what_a_call_constrains_reaches_the_engine_and_is_counted():
    tools = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "rest"}}]
    functions = [{"type": "function", **tool["function"]} for tool in tools]
    blocks = [{"name": "add", "input_schema": ADD["parameters"]}, {"name": "rest", "input_schema": {"type": "object"}}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "name": "x", "schema": schema}

    async def every_way(task):
        messages = [user("hi")]
        await ask(task, *messages, response_format={"type": "json_object"})
        await ask(
            task, *messages, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        )
        await ask(task, *messages, tools=tools, tool_choice="required")
        choice = {"type": "function", "function": {"name": "add"}}
        await ask(task, *messages, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        await ask(task, *messages, tools=tools)
        async with client(task) as opened:
            await opened.responses.create(model="m", input="hi", text={"format": named})
            await opened.responses.create(
                model="m", input="hi", tools=functions, tool_choice={"type": "function", "name": "add"}
            )
        async with anthropic.AsyncAnthropic(base_url=task.anthropic_url, api_key=task.api_key, max_retries=0) as opened:
            for choice in ({"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}):
                await opened.messages.create(
                    model="m", max_tokens=90, messages=messages, tools=blocks, tool_choice=choice
                )

    samples, engine = play(returning(every_way, 1.0), lambda text: "x", speaker=Guided)
    texts = [request.sampling.structural_tag for request in engine.requests]
    assert texts.pop(4) is None
    rules = [json.loads(text)["format"] for text in texts]
    assert [rule.get("json_schema") for rule in rules] == [
        {"type": "object"}, schema, None, None, schema, None, None, None,
    ]  # fmt: skip
    calls = [
        ([tag["begin"].split('"')[3] for tag in rule["tags"]], rule["stop_after_first"])
        for rule in rules
        if "tags" in rule
    ]
    both = ["add", "rest"]
    assert calls == [(both, False), (["add"], True), (["add"], False), (both, False), (["add"], True)]
    assert rules[2]["tags"][0]["content"] == {"type": "json_schema", "json_schema": ADD["parameters"]}
    # The begin and the end around the arguments are a call that is parsed.
    tag = rules[2]["tags"][0]
    assert written_calls(f'{tag["begin"]}{{"a": 1}}{tag["end"]}') == ['{"name": "add", "arguments": {"a": 1}}']
    assert sum(sample.counts["agent_constrained"] for sample in samples) == 8


def test_a_limit_and_a_stop_string_of_the_agents_own():
    read = []

    async def short(task):
        async with client(task) as opened:
            for options in ({"max_tokens": 2}, {"stop": ["lo"]}):
                response = await opened.chat.completions.create(model="m", messages=[user("hi")], **options)
                read.append((response.choices[0].message.content, response.choices[0].finish_reason))
            message = {"role": "assistant", "content": "hel"}
            await opened.chat.completions.create(model="m", messages=[user("hi"), message, user("on")])
        return 0.0

    samples, _ = play(short, lambda text: "hello")
    assert read == [("he", "length"), ("hel", "stop")]
    assert [pieces(sample) for sample in samples] == [
        [(1, "he")],
        [(1, "hello"), (0, "<e>\n<s>user\non<e>\n<s>assistant\n"), (1, "hello<e>")],
    ]


def test_an_agent_of_anthropics_client():
    read = []

    async def calculator(task):
        tools = [{"name": "add", "description": "Adds.", "input_schema": ADD["parameters"]}]
        messages = [user([{"type": "text", "text": task.prompt}])]
        async with anthropic.AsyncAnthropic(base_url=task.anthropic_url, api_key=task.api_key, max_retries=0) as opened:
            for _ in range(2):
                message = await opened.messages.create(
                    model="m", max_tokens=90, system="Add.", messages=messages, tools=tools
                )
                read.append(
                    (message.stop_reason, [block.type for block in message.content], message.usage.output_tokens)
                )
                messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
                    for block in message.content
                    if block.type == "tool_use"
                ]
                messages.append({"role": "user", "content": results})
            async with opened.messages.stream(model="m", max_tokens=90, messages=[user("go")], tools=tools) as stream:
                read.append((await stream.get_final_message()).content[0].input)
        return 1.0

    samples, engine = play(calculator, lambda text: "It is 3." if "<tool_response>" in text else ASKS)
    assert read == [
        ("tool_use", ["tool_use"], len(CHAT.encode(ASKS)) + 1), ("end_turn", ["text"], 9), {"a": 1, "b": 2},
    ]  # fmt: skip
    assert pieces(samples[0]) == [
        (1, f"{ASKS}<e>"),
        (0, "\n<s>user\n<tool_response>\n3\n</tool_response><e>\n<s>assistant\n"),
        (1, "It is 3.<e>"),
    ]
    assert CHAT.decode(engine.requests[0].token_ids).startswith("<s>tools{")
    assert "<s>system\nAdd.<e>\n<s>user\n6*7=<e>" in samples[0].prompt.text


def test_unserved_requests_are_reported():
    errors = []

    async def wrong(task):
        image = {"type": "image_url", "image_url": {"url": "http://x"}}
        for messages, options in (([], {}), ([user([image])], {}), ([user("hi")], {"n": 0})):
            try:
                await ask(task, *messages, **options)
            except openai.BadRequestError as error:
                errors.append(str(error))
        stranger = openai.AsyncOpenAI(base_url=task.base_url, api_key="sk-guess", max_retries=0)
        try:
            await stranger.chat.completions.create(model="m", messages=[user("hi")])
        except openai.AuthenticationError as error:
            errors.append(str(error))
        await ask(task, user("hi"))

    [sample], engine = play(wrong, lambda text: "x")
    for error, expected in zip(
        errors, ("there are none", "image_url cannot be shown", "n: Input should", "no such key"), strict=True
    ):
        assert expected in error
    assert len(engine.requests) == 1
    assert pieces(sample) == [(1, "x<e>")]
    with pytest.raises(PluginError, match="no chat template"):
        play(wrong, lambda text: "x", tokenizer=character_tokenizer("ab"))


def test_an_agent_that_never_ends(monkeypatch):
    async def for_ever(task):
        messages = [user("hi")]
        while True:
            message = await ask(task, *messages)
            messages += [{"role": "assistant", "content": message.content}, user("on")]

    [sample], engine = play(for_ever, lambda text: "x", config={"max_calls": 3})
    assert (sample.status, len(engine.requests)) == (Status.TRUNCATED, 3)

    def reply(text):
        nonlocal run
        run = asyncio.get_running_loop()
        return "x"

    async def sleeps(task):
        await ask(task, user("hi"))
        # The run's clock is put forward: a limit short enough to be waited for may be over before the response is there.
        now = run.time
        monkeypatch.setattr(run, "time", lambda: now() + 60)
        run.call_soon_threadsafe(int)
        await asyncio.sleep(600)

    run = None
    [sample], _ = play(sleeps, reply, config={"timeout_s": 60})
    assert (sample.status, sample.response) == (Status.TRUNCATED, "x<e>")


def test_an_agent_that_blocks_is_named_and_the_run_continues(monkeypatch):
    held, runs, stops = threading.Event(), [], []

    async def hog(task):
        # Its time is over when it has begun, however slow the machine is.
        run, now = runs[-1], runs[-1].time
        monkeypatch.setattr(run, "time", lambda: now() + 60)
        run.call_soon_threadsafe(int)
        held.wait(600)

    async def hog_later(task):
        await ask(task, user("hi"))
        runs[-1].call_soon_threadsafe(stops[-1].set)
        held.wait(600)

    async def scene(function, **config):
        turns = 0

        async def turn():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.01)

        stop = asyncio.Event()
        runs.append(asyncio.get_running_loop())
        stops.append(stop)
        generator = ServedAgent(FunctionAgent(function, name="mine", grace_s=0.2), AgentConfig(**config))
        speaker = Speaker(lambda text: "x", tokenizer=CHAT)
        turning = asyncio.create_task(turn())
        try:
            return await generator.generate(episode_with(speaker, tokenizer=CHAT, stop=stop))
        finally:
            turning.cancel()
            assert turns > 3
            await generator.close()

    place = rf"{re.escape(__file__)}:{hog.__code__.co_firstlineno + 5}"
    try:
        with pytest.raises(PluginError, match=rf"agent mine blocks the event loop of all agents at {place}: .*command"):
            asyncio.run(scene(hog, timeout_s=60))
        # A run that ends does not wait for it, and keeps what it has.
        assert [sample.response for sample in asyncio.run(scene(hog_later))] == ["x<e>"]
    finally:
        held.set()


def test_an_agent_that_has_ended_does_not_block():
    """The agent ends while it is cancelled; then another function blocks the loop."""
    held, holding = threading.Event(), threading.Event()

    async def ends(task):
        loop = asyncio.get_running_loop()
        # Runs after the callback that reports to the run.
        loop.call_soon(loop.call_soon, loop.call_soon, hold)

    def hold():
        holding.set()
        held.wait(600)

    async def scene():
        agent = FunctionAgent(ends, grace_s=0.2)
        task = AgentTask(
            prompt="",
            messages=None,
            metadata={},
            evaluation=False,
            base_url="",
            anthropic_url="",
            api_key="",
            name_thread=print,
        )
        running = asyncio.create_task(agent.run(task))
        await asyncio.sleep(0)
        # Blocks the run's own event loop meanwhile.
        holding.wait()
        running.cancel()
        await asyncio.wait([running])
        held.set()
        await agent.close()
        return agent.stuck

    try:
        assert asyncio.run(scene()) is None
    finally:
        held.set()


def test_agents_of_a_run_share_an_event_loop():
    loops = []

    async def one(task):
        loops.append((asyncio.get_running_loop(), threading.current_thread()))
        raise SystemExit(3)

    async def scene():
        agents = [ServedAgent(FunctionAgent(one), AgentConfig()) for _ in range(2)]
        for generator in agents:
            # It is run again, or counted.
            with pytest.raises(AgentFailed, match=r"SystemExit\(3\)"):
                await generator.generate(episode_with(Chat(lambda text: "x"), tokenizer=CHAT))
        for generator in agents:
            await generator.close()

    asyncio.run(scene())
    assert loops[0] == loops[1]
    loops[0][1].join(60)
    assert not loops[0][1].is_alive()
    assert loops[0][1] is not threading.main_thread()


def test_an_agent_that_fails():
    async def raises(task):
        await ask(task, user("hi"))
        raise KeyError("its own fault")

    with pytest.raises(KeyError, match="its own fault"):
        play(raises, lambda text: "x")

    async def idle(task):
        return None

    with pytest.raises(AgentFailed, match="has not called the model"):
        play(idle, lambda text: "x")

    async def once(task):
        await ask(task, user("hi"))

    with pytest.raises(EngineError, match="died"):
        play(once, lambda text: "x", fails=EngineError("it died"))


@pytest.mark.parametrize("returned", [float("nan"), float("inf"), "1.0", [1.0]])
def test_an_agent_that_returns_no_number_fails(returned):
    async def once(task):
        await ask(task, user("hi"))
        return returned

    with pytest.raises(AgentFailed, match=r"the agent returned .*: it must return a finite number, or None"):
        play(once, lambda text: "x")


def test_two_calls_at_the_same_time_are_two_samples():
    async def both(task):
        await asyncio.gather(ask(task, user("hi")), ask(task, user("hi")))

    samples, _ = play(returning(both, 1.0), lambda text: "x")
    assert [pieces(sample) for sample in samples] == [[(1, "x<e>")]] * 2


def test_an_abort_reaches_an_agent_that_is_busy_elsewhere():
    stop, runs = asyncio.Event(), []

    async def busy(task):
        await ask(task, user("hi"))
        runs[0].call_soon_threadsafe(stop.set)
        await asyncio.sleep(600)

    def reply(text):
        runs.append(asyncio.get_running_loop())
        return "x"

    samples, _ = play(busy, reply, stop=stop)
    # What it has is kept for later, though the model is not in the middle of a word.
    assert [(sample.status, sample.response) for sample in samples] == [(Status.ABORTED, "x<e>")]


def test_a_partial_rollout_is_replayed_and_continued():
    async def two(task):
        first = await ask(task, user("hi"))
        await ask(task, user("hi"), {"role": "assistant", "content": first.content}, user("on"))

    [whole], _ = play(two, lambda text: "second" if "on<e>" in text else "first")
    for length in (3, len("first") + 1, whole.response_length - 4):
        kept = replace(
            whole,
            tokens=whole.tokens[: whole.prompt_length + length],
            loss_mask=whole.loss_mask[:length],
            rollout_log_probs=whole.rollout_log_probs[:length] - 1,
            spans=(VersionSpan(1, 0, min(length, 6)),),
            status=Status.ABORTED,
        )
        [sample], engine = play(two, lambda text, n=length: tail(text), kept=kept)
        assert np.array_equal(sample.tokens, whole.tokens), length
        trained = kept.loss_mask == 1
        np.testing.assert_array_equal(sample.rollout_log_probs[:length][trained], kept.rollout_log_probs[trained])
        assert sample.spans[0].version == 1
        assert sum(len(c.token_ids) for c in engine.completions) == int(whole.loss_mask[length:].sum())


def test_a_constrained_response_that_was_aborted_begins_again():
    async def one(task):
        await ask(task, user("hi"), response_format={"type": "json_object"})
        return 1.0

    [whole], _ = play(one, lambda text: '{"a": 1}', speaker=Guided)
    kept = replace(
        whole,
        tokens=whole.tokens[: whole.prompt_length + 3],
        loss_mask=whole.loss_mask[:3],
        rollout_log_probs=whole.rollout_log_probs[:3],
        spans=(VersionSpan(1, 0, 3),),
        status=Status.ABORTED,
    )
    [sample], engine = play(one, lambda text: '{"a": 1}', speaker=Guided, kept=kept)
    # An engine knows nothing of the grammar's state after three tokens.
    assert len(engine.requests[0].token_ids) == whole.prompt_length
    assert np.array_equal(sample.tokens, whole.tokens)


@pytest.mark.parametrize(
    ("calls", "runs"),
    [({"stop": ["lo"]}, {}), ({}, {"stop": ("lo",)}), ({}, {"stop_token_ids": (CHAT.convert_tokens_to_ids("o"),)})],
)
def test_a_response_that_was_stopped_is_not_continued(calls, runs):
    async def two(task):
        first = await ask(task, user("hi"), **calls)
        await ask(task, user("hi"), {"role": "assistant", "content": first.content}, user("on"), **calls)

    def reply(text):
        begun = text.rpartition("<s>assistant\n")[2]
        return "hello, and more".removeprefix(begun) if "hello, and more".startswith(begun) else "beyond"

    class Stopping(Speaker):
        def script(self, request):
            tokens, reason = super().script(request)
            ends = np.flatnonzero(np.isin(tokens, request.sampling.stop_token_ids))
            return tokens[: ends[0] + 1] if len(ends) else tokens, reason

    sampling = SamplingParams(max_new_tokens=400, **runs)
    [whole], _ = play(two, reply, sampling=sampling, speaker=Stopping)
    assert pieces(whole)[0] == (1, "hello")
    # Broken off while the agent was busy with its first response, and in the middle of that.
    for length in (len("hello"), len("hel")):
        kept = replace(
            whole,
            tokens=whole.tokens[: whole.prompt_length + length],
            loss_mask=whole.loss_mask[:length],
            rollout_log_probs=whole.rollout_log_probs[:length],
            spans=(VersionSpan(1, 0, length),),
            status=Status.ABORTED,
        )
        [sample], _ = play(two, reply, sampling=sampling, speaker=Stopping, kept=kept)
        assert pieces(sample) == pieces(whole), length


def tail(text):
    """What is missing of the response that a text ends with."""
    begun = text.rpartition("<s>assistant\n")[2]
    if begun.endswith("<e>"):
        return ""
    return ("second" if "on<e>" in text else "first").removeprefix(begun)


def test_threads_have_conversations_and_rewards_of_their_own():
    class Pair(Agent):
        scores_itself = True

        async def run(self, task):
            for name in ("one", "other", "judge"):
                task.name_thread(name)
                async with client(task, default_headers={"X-Session-ID": name}) as opened:
                    await opened.chat.completions.create(model="slime", messages=[user("hi")])
            threads = {"one": (1.0, 0), "other": (-1.0, 1)}
            earned = {
                name: Earned(reward=reward, parts={"x": reward}, agent=name, number=number, num_agents=2)
                for name, (reward, number) in threads.items()
            }
            return {**earned, "judge": Earned(reward=0.0, is_trained=False)}

    async def scene(agent, **config):
        generator = ServedAgent(agent, AgentConfig(**config))
        try:
            return await generator.generate(episode_with(Speaker(lambda text: "yes", tokenizer=CHAT), tokenizer=CHAT))
        finally:
            await generator.close()

    # Same response to the same question: only the thread distinguishes them.
    samples = asyncio.run(scene(Pair()))
    assert [pieces(sample) for sample in samples] == [[(1, "yes<e>")]] * 2
    assert [(s.metadata["agent"], s.reward, s.reward_parts["x"]) for s in samples] == [("one", 1, 1), ("other", -1, -1)]
    assert [sample.credit_key for sample in samples] == [-7, -8]
    with pytest.raises(AgentFailed, match=r"it had not ended within 0\.01 s, and has no reward"):
        asyncio.run(scene(Pair(), timeout_s=0.01))


async def test_a_thread_that_is_named_too_late_is_nobodys():
    server = AgentServer()
    key = await server.open(None)
    server.drop(key)
    server.name_thread(key, "late")
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as opened:
        with pytest.raises(openai.AuthenticationError, match="its episode has ended"):
            await opened.chat.completions.create(
                model="m", messages=[user("hi")], extra_headers={"X-Session-ID": "late"}
            )
    await server.close()


def test_a_command_is_an_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("PASSED", "p")
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys\n"
        "task = json.load(sys.stdin)\n"
        "assert 'SECRET' not in os.environ and os.environ['PASSED'] == 'p' and 'label' not in task\n"
        "print('x' * 10**6)\n"
        "if task['metadata']['from'] == 'nowhere': sys.exit('no way')\n"
        "import openai\n"
        "reply = openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': task['prompt']}])\n"
        "assert reply.choices[0].message.content == '42'\n"
    )

    def run(**options):
        async def scene():
            generator = OpenaiAgent.build(CommandConfig(command=(sys.executable, str(script)), environment=("PASSED",)))
            engine = Speaker(lambda text: "42", tokenizer=CHAT)
            try:
                return await generator.generate(episode_with(engine, tokenizer=CHAT, **options))
            finally:
                await generator.close()

        return asyncio.run(scene())

    [sample] = run()
    assert pieces(sample) == [(1, "42<e>")]
    with pytest.raises(AgentFailed, match=r"(?s)exit code 1: .*no way"):
        run(metadata={"from": "nowhere"})


def test_a_program_that_leaves_a_process_behind_ends(tmp_path):
    # In a session of its own, with the agent's output open.
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True); sys.exit('too bad')"

    async def scene():
        generator = OpenaiAgent.build(CommandConfig(command=(sys.executable, "-c", code), timeout_s=50))
        try:
            await generator.open()
            await generator.generate(episode_with(Speaker(str, tokenizer=CHAT), tokenizer=CHAT))
        finally:
            await generator.close()

    with pytest.raises(AgentFailed, match="ended with exit code 1"):
        asyncio.run(scene())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"command": ["no-such-agent"]},
            r'generate\.command = "no-such-agent": there is no such program, or it may not be run\.$',
        ),
        (
            {"command": ["./agent.py"]},
            r'generate\.command = "\./agent\.py": .* Write its whole path, or set generate\.folder',
        ),
        ({"command": ["sleep"], "folder": "/no/where"}, r'generate\.folder = "/no/where": there is no such folder'),
    ],
)
def test_a_program_that_is_missing_is_named_before_the_run_starts(options, message):
    with pytest.raises(PluginError, match=message):
        asyncio.run(OpenaiAgent.build(CommandConfig(**options)).open())


def test_a_function_in_a_plugin_file_is_a_generator(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from slime_agents.plugin import agent\n\n@agent('mine')\nasync def mine(task):\n    'What it does.'\n    return 1.0\n"
    )
    [(entry, driver)] = PluginFile.read(file).load().items()
    assert (entry.group, entry.name) == ("slime.generators", "mine")
    assert driver.__doc__ == "What it does."
    assert isinstance(driver.build(driver.Config(max_calls=2)), ServedAgent)
