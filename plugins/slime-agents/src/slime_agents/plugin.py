"""Drivers of slime-agents. The generators are imported when they are built."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slime_agents.config import AgentConfig, CommandConfig, MultiAgentConfig, RetoolConfig, RetoolRewardConfig
from slime_core.contracts.example import Example, RewardExample
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.reward import Reward, RewardDriver
from slime_core.plugin import generator

if TYPE_CHECKING:
    from slime_agents.served.agents import AgentFunction


class Retool(GeneratorDriver):
    """Responses with code blocks, which are run in a sandbox and whose output the model reads (ReTool)."""

    Config = RetoolConfig

    @classmethod
    def build(cls, config: RetoolConfig) -> Generator:
        from slime_agents.retool import Retool as Built

        return Built(config)


class MultiAgent(GeneratorDriver):
    """Several agents, one model: each reads what the earlier ones wrote and is trained on its own responses."""

    Config = MultiAgentConfig

    @classmethod
    def build(cls, config: MultiAgentConfig) -> Generator:
        from slime_agents.multi_agent import MultiAgent as Built

        return Built(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        debaters = [{"name": "one", "count": 2}, {"name": "other", "prompt": "{{ answers.one | join(' or ') }}?"}]
        return [Example(options={"agents": debaters, "rounds": 2}), Example(options={"agents": [{"name": "alone"}]})]


class OpenaiAgent(GeneratorDriver):
    """Any program that calls OpenAI's or Anthropic's API: its calls become samples."""

    Config = CommandConfig

    @classmethod
    def build(cls, config: CommandConfig) -> Generator:
        from slime_agents.served.agents import CommandAgent
        from slime_agents.served.generator import ServedAgent

        agent = CommandAgent(config.command, environment=config.environment, folder=config.folder)
        return ServedAgent(agent, config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        # It is started for every response, so it imports nothing slow.
        caller = folder / "caller.py"
        caller.write_text(CALLER)
        return [Example(options={"command": [sys.executable, "-I", "-S", str(caller)]})]


CALLER: Final = """
import json, os, socket, sys
address = os.environ["OPENAI_BASE_URL"].removeprefix("http://").removesuffix("/v1")
prompt = json.load(sys.stdin)["prompt"]
body = json.dumps({"model": "slime", "messages": [{"role": "user", "content": prompt}]}).encode()
head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: {address}\\r\\nConnection: close\\r\\nContent-Length: {len(body)}\\r\\n"
with socket.create_connection(address.split(":")) as server:
    server.sendall(f"{head}Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\n\\r\\n".encode() + body)
    response = b""
    while data := server.recv(65536):
        response += data
sys.exit(response.split()[1] != b"200")
"""


def agent(name: str) -> Callable[[AgentFunction], type[GeneratorDriver]]:
    """Names an async function `f(task: AgentTask)` as a generator, in a plugin file or for an entry point; its options are
    those of AgentConfig:

        @agent("calculator")
        async def calculator(task):
            client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    """

    def made(function: AgentFunction) -> type[GeneratorDriver]:
        def build(cls: type, config: AgentConfig) -> Generator:
            from slime_agents.served.agents import FunctionAgent
            from slime_agents.served.generator import ServedAgent

            return ServedAgent(FunctionAgent(function, name=name), config)

        body: dict[str, Any] = {
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "Config": AgentConfig,
            "build": classmethod(build),
        }
        return generator(name)(type(function.__name__, (GeneratorDriver,), body))

    return made


class RetoolReward(RewardDriver):
    """+1 if the last box near the end holds the label, character by character, else -1, and slightly more for each tool call,
    up to -0.6 (ReTool)."""

    Config = RetoolRewardConfig
    reward_key = "score"

    @classmethod
    def build(cls, config: RetoolRewardConfig) -> Reward:
        from slime_agents.boxed_reward import BoxedReward

        return BoxedReward(config.shown_characters)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        boxed = ["so \\boxed{12}", "\\boxed{12} no, \\boxed{11}", "12", "\\boxed{12}" + " " * 100]
        few, many = {"tool_calls": 4}, {"tool_calls": 16}
        wrong_or_right = ["\\boxed{13}", "\\boxed{12}"]
        return [
            RewardExample(prompt="3*4=", label="12", responses=boxed, rewards=[1.0, -1.0, -1.0, -1.0]),
            RewardExample(prompt="3*4=", label="12", metadata=few, responses=wrong_or_right, rewards=[-0.9, 1.0]),
            RewardExample(prompt="3*4=", label="12", metadata=many, responses=["\\boxed{{12}}"], rewards=[-0.6]),
        ]
