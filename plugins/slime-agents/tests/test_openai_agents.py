"""An agent of the openai-agents package with its default settings: the model's name, the API and the address are those that
it finds in its environment."""

import asyncio
import sys

import pytest
from agents_played import CHAT, pieces
from agents_speaker import Speaker, episode_with

from slime_agents.config import CommandConfig
from slime_agents.plugin import OpenaiAgent

pytest.importorskip("agents", reason="pip install openai-agents")

SCRIPT = '''
import asyncio, json, sys
from agents import Agent, Runner, function_tool

@function_tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)

adder = Agent(name="adder", instructions="You add.", tools=[add])
async def both():
    result = await Runner.run(adder, json.load(sys.stdin)["prompt"])
    assert result.final_output == "It is 3.", result.final_output
    usage = result.context_wrapper.usage
    assert (usage.requests, usage.output_tokens) == (2, USED), usage
    streamed = Runner.run_streamed(adder, "stream")
    async for event in streamed.stream_events():
        pass
    assert streamed.final_output == "It is 3.", streamed.final_output

asyncio.run(both())
'''
ASKS = '<tool_call>\n{"arguments":  {"a":1,"b": 2}, "name": "add"}\n</tool_call>'


def test_its_default_settings_are_served(tmp_path):
    used = len(CHAT.encode(f"{ASKS}<e>It is 3.<e>"))
    script = tmp_path / "agent.py"
    script.write_text(SCRIPT.replace("USED", str(used)))

    async def scene():
        generator = OpenaiAgent.build(CommandConfig(command=(sys.executable, str(script))))
        engine = Speaker(lambda text: "It is 3." if "<tool_response>" in text else ASKS, tokenizer=CHAT)
        episode = episode_with(engine, tokenizer=CHAT, scorer=scored)
        try:
            return await generator.generate(episode)
        finally:
            await generator.close()

    async def scored(group):
        return group

    first, second = asyncio.run(scene())
    assert pieces(first) == [
        (1, f"{ASKS}<e>"),
        (0, "\n<s>user\n<tool_response>\n3\n</tool_response><e>\n<s>assistant\n"),
        (1, "It is 3.<e>"),
    ]
    assert pieces(second) == pieces(first)
    assert "<s>system\nYou add.<e>\n<s>user\n6*7=<e>\n<s>assistant\n" in first.prompt.text
    assert first.prompt.text.startswith("<s>tools")
