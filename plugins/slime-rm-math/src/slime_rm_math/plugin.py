"""Drivers of slime-rm-math: the four rewards, and their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.reward import Reward, RewardDriver

if TYPE_CHECKING:
    from slime_core.contracts.example import Example


class BoxedConfig(DriverConfig):
    """Options of the rewards that compare a boxed answer."""

    max_symbolic_chars: int = Field(256, ge=0)
    """Longer answers are compared as normalized text only: the time to parse LaTeX grows faster than its length."""


class DeepScalerConfig(BoxedConfig):
    think_end: str = Field("</think>", min_length=1)
    """Tag that closes the reasoning; only what follows its last occurrence is graded."""


class DapoConfig(DriverConfig):
    window_chars: int = Field(300, gt=0)
    """Only this many characters at the end of the response are searched for the answer line."""


class Math(RewardDriver):
    """1 if the last \\boxed{} of the response equals the label, else 0."""

    Config = BoxedConfig

    @classmethod
    def build(cls, config: BoxedConfig) -> Reward:
        from slime_rm_math.math import MathReward

        return MathReward(max_symbolic_chars=config.max_symbolic_chars)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_math import examples

        return examples.MATH


class Dapo(RewardDriver):
    """`score` +1 or -1 and `acc` 1 or 0, from the last "Answer: ..." line near the end of the response."""

    Config = DapoConfig
    reward_key: ClassVar[str | None] = "score"

    @classmethod
    def build(cls, config: DapoConfig) -> Reward:
        from slime_rm_math.dapo import DapoReward

        return DapoReward(window_chars=config.window_chars)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_math import examples

        return examples.DAPO


class DeepScaler(RewardDriver):
    """Grades like math, but only the text after the reasoning; a response that never ends its reasoning gets 0."""

    Config = DeepScalerConfig

    @classmethod
    def build(cls, config: DeepScalerConfig) -> Reward:
        from slime_rm_math.deepscaler import DeepScalerReward

        return DeepScalerReward(think_end=config.think_end, max_symbolic_chars=config.max_symbolic_chars)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_math import examples

        return examples.DEEPSCALER


class Gsm8k(RewardDriver):
    """1 if the number that the response ends with equals the number after "####" in the label, else 0."""

    @classmethod
    def build(cls, config: DriverConfig) -> Reward:
        from slime_rm_math.gsm8k import Gsm8kReward

        return Gsm8kReward()

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_rm_math import examples

        return examples.GSM8K
