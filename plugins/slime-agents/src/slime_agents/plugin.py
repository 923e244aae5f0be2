"""Drivers of slime-agents. The generators are imported when they are built."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, model_validator

from slime_agents.sandbox.terms import SandboxConfig
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import Example, RewardExample
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.paths import RunPath
from slime_core.contracts.reward import Reward, RewardDriver
from slime_core.plugin import generator

if TYPE_CHECKING:
    from slime_agents.served.agents import AgentFunction


class RetoolConfig(DriverConfig):
    code_begin: str = "<code>"
    """What a code block begins with."""
    code_end: str = "</code>"
    """What it ends with: there the model's turn ends, and the code is run. Code fences inside are left out."""
    output_begin: str = "\n<interpreter>\n"
    """What stands before the output."""
    output_end: str = "\n</interpreter>\n"
    """What stands after it."""
    max_tool_calls: int = Field(16, ge=0)
    """An answer that asks once more ends there, truncated."""
    max_output_chars: int = Field(2048, ge=16)
    """Of longer output the middle is left out."""
    tracebacks: bool = False
    """Whether the model sees the whole traceback of its code, or only the last line."""
    tool: bool = True
    """Off: nothing is run, for a comparison with the model alone."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits and walls of the interpreter."""


class Retool(GeneratorDriver):
    """Answers with code in between, which is run in a sandbox and whose output the model reads (ReTool)."""

    Config = RetoolConfig

    @classmethod
    def build(cls, config: RetoolConfig) -> Generator:
        from slime_agents.retool import Retool as Built

        return Built(config)


class AgentRole(DriverConfig):
    """One of several agents."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """How templates, metadata and metrics call it."""
    prompt: str | None = None
    """What it reads: a Jinja template of `prompt` (the task), `metadata`, `round` (from 0), and `answers`, which has a list of
    texts for each agent's name. None: the task as it is."""
    count: int = Field(1, gt=0)
    """Answers to the same text."""
    max_new_tokens: int | None = Field(None, gt=0)
    """Tokens that an answer may have, besides the run's own limit."""
    outcome_share: float = Field(0.0, ge=0, le=1)
    """Its reward is this much of the outcome's (the mean of the agent that speaks last), and the rest its own answer's."""


SOLVER: Final = AgentRole(name="solver")
CRITIC: Final = AgentRole(
    name="critic",
    prompt="{{ prompt }}\n{{ answers.solver[-1] }}\nWhat is wrong with this answer?\n",
    outcome_share=1.0,
)
EDITOR: Final = AgentRole(
    name="editor",
    prompt="{{ prompt }}\n{{ answers.solver[-1] }}\n{{ answers.critic[-1] }}\nThe right answer:\n",
)


class MultiAgentConfig(DriverConfig):
    agents: tuple[AgentRole, ...] = Field((SOLVER, CRITIC, EDITOR), min_length=1)
    """In the order in which they speak."""
    rounds: int = Field(1, gt=0)
    """How often all of them speak."""

    @model_validator(mode="after")
    def _names_differ(self) -> MultiAgentConfig:
        names = [agent.name for agent in self.agents]
        if len(set(names)) < len(names):
            raise ValueError(f"agents: {', '.join(names)}: each needs a name of its own")
        return self


class MultiAgent(GeneratorDriver):
    """Several agents, one model: each reads what the earlier ones wrote and is trained on its own answers."""

    Config = MultiAgentConfig

    @classmethod
    def build(cls, config: MultiAgentConfig) -> Generator:
        from slime_agents.multi_agent import MultiAgent as Built

        return Built(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        debaters = [{"name": "one", "count": 2}, {"name": "other", "prompt": "{{ answers.one | join(' or ') }}?"}]
        return [Example(options={"agents": debaters, "rounds": 2}), Example(options={"agents": [{"name": "alone"}]})]


class AgentConfig(DriverConfig):
    """Options of every agent that is called over HTTP."""

    timeout_s: float = Field(600.0, gt=0)
    """Seconds after which the agent is ended; its samples count as truncated."""
    max_calls: int = Field(64, gt=0)
    """Calls that it may make; then it is told that there are no more answers, and its samples count as truncated."""
    fork_threshold: int = Field(1024, ge=0)
    """Where an agent goes on with another text than the model's last response, one of fewer tokens is given up (not trained);
    a longer one stays a sample of its own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Handed to the chat template, such as enable_thinking."""


class CommandConfig(AgentConfig):
    command: tuple[str, ...] = Field(min_length=1)
    """A program and its arguments. It gets the task as JSON on standard input, and OPENAI_BASE_URL, OPENAI_API_KEY,
    OPENAI_MODEL, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY in its environment."""
    environment: tuple[str, ...] = ()
    """Variables of the run's environment that it gets too, besides PATH, HOME and the language."""
    folder: RunPath | None = None
    """Where it runs; by default in an empty folder of its own, which is removed."""


class OpenaiAgent(GeneratorDriver):
    """Any program that speaks with OpenAI's or Anthropic's API: its calls become samples."""

    Config = CommandConfig

    @classmethod
    def build(cls, config: CommandConfig) -> Generator:
        from slime_agents.served.agents import CommandAgent
        from slime_agents.served.generator import ServedAgent

        agent = CommandAgent(config.command, environment=config.environment, folder=config.folder)
        return ServedAgent(agent, config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        # A client without imports that take time: it is started for every answer.
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
    answer = b""
    while data := server.recv(65536):
        answer += data
sys.exit(answer.split()[1] != b"200")
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


class RetoolRewardConfig(DriverConfig):
    shown_characters: int = Field(100, gt=0)
    """How far from the end the box may stand."""


class RetoolReward(RewardDriver):
    """+1 if the last box near the end holds the label, letter by letter, else -1, and a little less bad the more the tool was
    called, up to -0.6 (ReTool)."""

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
