"""Drivers of slime-agents. The generators are imported when they are built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

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
