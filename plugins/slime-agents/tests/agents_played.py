"""Agents that are functions, played with an engine that speaks, in the format of the Hermes and Qwen families."""

import asyncio

import numpy as np
from agents_speaker import Speaker, episode_with

from slime_agents.config import AgentConfig
from slime_agents.served.agents import FunctionAgent
from slime_agents.served.generator import ServedAgent
from slime_models.new_model import character_tokenizer

HERMES = (
    "{% if tools %}<s>tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<e>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<s>user\n<tool_response>\n{{ m.content }}\n</tool_response><e>\n"
    "{% else %}<s>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}<e>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CHAT = character_tokenizer("".join(map(chr, range(32, 127))) + "\n", ["<s>", "<e>", "<tool_call>", "</tool_call>"])
CHAT.eos_token = "<e>"
CHAT.chat_template = HERMES


def play(function, reply, *, tokenizer=CHAT, fails=None, held=False, config=None, speaker=Speaker, **options):
    """The samples of an agent that is an async function, and the engine that it spoke with."""

    async def scene():
        engine = speaker(reply, failure=fails, held=held, tokenizer=tokenizer)
        generator = ServedAgent(FunctionAgent(function), AgentConfig(**(config or {})))
        try:
            return await generator.generate(episode_with(engine, tokenizer=tokenizer, **options)), engine
        finally:
            await generator.close()

    return asyncio.run(scene())


def user(text):
    return {"role": "user", "content": text}


def pieces(sample, tokenizer=CHAT):
    cuts = np.flatnonzero(np.diff(sample.loss_mask.astype(int))) + 1
    parts = zip(np.split(sample.loss_mask, cuts), np.split(sample.response_tokens, cuts), strict=True)
    return [(int(mask[0]), tokenizer.decode(tokens)) for mask, tokens in parts]


def returning(function, reward):
    async def both(task):
        await function(task)
        return reward

    return both
