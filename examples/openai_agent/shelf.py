"""The task of the openai_agent example: how many things lie on a shelf, which only a tool knows.

The agent in this file is written for OpenAI's API and has no code for training: it offers the model a tool, runs the calls
that come back, and ends when the model answers in words. `b47` has to become a call for that very shelf. Held-out
shelves are in no training prompt, so what lies there cannot be known by heart.

The warm start (`../warm_start.py`) teaches the form, with calls that often name another shelf; reinforcement learning, which
sees only whether the number is right, has to teach the rest.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import openai

from slime_agents.plugin import agent
from slime_core.plugin import reward
from slime_models.new_model import ModelSizes

if TYPE_CHECKING:
    from slime_agents.served.agents import AgentTask
    from slime_core.types.sample import Sample

NUM_HELD_OUT: Final = 100
HALLS: Final = "bcdfghjk"
NOISE: Final = 0.5
"""Chance of a worked example whose call has another digit or hall."""
COUNT: Final = {
    "name": "count",
    "description": "How many things lie on a shelf.",
    "parameters": {"type": "object", "properties": {"shelf": {"type": "string"}}},
}
# The model is small, so the template leaves out the tools' descriptions.
TEMPLATE: Final = (
    "{% for m in messages %}{{ '<tool>' if m.role == 'tool' else '<user>' if m.role == 'user' else '<model>' }}"
    "{{ m.content }}{% if m.role != 'user' and m.role != 'tool' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
CALL: Final = '<tool_call>{"name": "count", "arguments": {"shelf": "'
END_OF_CALL: Final = '"}}</tool_call>'

# Episodes share its connections: creating a client takes longer than a response of the model.
CLIENT: Final = openai.AsyncOpenAI(base_url="http://set-later", api_key="set-later", max_retries=0)


@agent("stocktaker")
async def stocktaker(task: AgentTask) -> None:
    """Asks the model how many things are on a shelf, and runs its tool calls."""
    await take_stock(task, count)


@agent("stocktaker_without_tool")
async def stocktaker_without_tool(task: AgentTask) -> None:
    """The same agent with a tool that returns no information."""
    await take_stock(task, lambda shelf: "000")


@reward("stock")
def stock(sample: Sample) -> float:
    """1 if the model's last message is the number of things on the shelf."""
    return float(sample.raw_response.endswith(f"<model>{count(sample.metadata['shelf'])}<end>"))


async def take_stock(task: AgentTask, tool: Callable[[str], str]) -> None:
    messages: list[Any] = [{"role": "user", "content": task.metadata["shelf"]}]
    tools: Any = [{"type": "function", "function": COUNT}]
    client = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    for _ in range(2):
        answer = await client.chat.completions.create(model=task.model, messages=messages, tools=tools)
        given = answer.choices[0].message
        if not given.tool_calls:
            return
        messages.append(given.model_dump(exclude_none=True))
        for call in given.tool_calls:
            shelf = json.loads(call.function.arguments).get("shelf")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": tool(str(shelf))})


def count(shelf: str) -> str:
    """Three digits, for any text."""
    return str(random.Random(shelf).randrange(100, 1000))


def shelves() -> list[str]:
    return [f"{hall}{number}" for hall in HALLS for number in range(10, 100)]


class Stocktaking:
    alphabet = f"0123456789{HALLS}"
    tokens = ("<user>", "<model>", "<tool>", CALL, END_OF_CALL)
    chat_template = TEMPLATE
    sizes = ModelSizes(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=192, max_length=64)
    enough = 0.12
    lr = 6e-3
    max_steps = 600

    def rows(self, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        shuffled = [shelves()[number] for number in np.random.default_rng(seed).permutation(len(shelves()))]
        rows = [{"prompt": f"<user>{s}<model>", "label": s, "metadata": {"shelf": s}} for s in shuffled]
        return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]

    def worked(self, rows: Sequence[dict[str, Any]], seed: int) -> list[list[tuple[str, bool]]]:
        rng = np.random.default_rng(seed)
        return [worked(row["label"], rng) for _ in range(4) for row in rows]


def worked(shelf: str, rng: np.random.Generator) -> list[tuple[str, bool]]:
    asked = shelf
    if rng.random() < NOISE:
        place = int(rng.integers(3))
        other = rng.choice(list(HALLS if place == 0 else "123456789"))
        asked = f"{shelf[:place]}{other}{shelf[place + 1 :]}"
    things = str(rng.integers(100, 1000))
    return [
        (f"<user>{shelf}<model>", False),
        (f"{CALL}{asked}{END_OF_CALL}<end>", True),
        (f"<tool>{things}<model>", False),
        (things, True),
    ]


TASK = Stocktaking()
