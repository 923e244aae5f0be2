"""Drivers of slime-agents. The generators are imported when they are built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import Field, model_validator

from slime_agents.sandbox.terms import SandboxConfig
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import Example, RewardExample
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.reward import Reward, RewardDriver


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
