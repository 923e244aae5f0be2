"""What the entry points name: an old function by its dotted path, as a reward, a generator or a group filter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import Example, RewardExample
from slime_core.contracts.filter import FilterDriver, GroupFilter
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.paths import RunPath
from slime_core.contracts.reward import Reward, RewardDriver

REQUEST_TIMEOUT_S: Final = 600.0


class OldFunctionConfig(DriverConfig):
    path: str = Field(min_length=1)
    """Dotted path of the function: package.module.function."""
    python_path: tuple[RunPath, ...] = ()
    """Folders in which its module is looked for, after the interpreter's own."""
    args: dict[str, Any] = Field(default_factory=dict)
    """What the function finds in its argument `args`, by the names that it reads there."""


class AskingFunctionConfig(OldFunctionConfig):
    """Of functions that may wait for an answer; a filter decides in the event loop, and cannot."""

    request_timeout: float = Field(REQUEST_TIMEOUT_S, gt=0)
    """Seconds for one request that the function sends by `post` or `get` to anything but the run's engines."""


class CompatRewardConfig(AskingFunctionConfig):
    group: bool = False
    """The function takes (args, samples) and returns a list: it compares the answers of a group."""


class CompatGeneratorConfig(AskingFunctionConfig):
    missing_log_probs: Literal["error", "zero"] = "error"
    """What becomes of trained tokens that no engine's answer of this episode has at their place, such as text that was
    tokenised again, and that come without rollout_log_probs. error: the sample fails, and says where. zero: they are trained
    with log-prob 0, which is right only where nothing reads the rollout's log-probs; its metrics are wrong then."""


class CompatReward(RewardDriver):
    """A reward function that was written for THUDM's slime."""

    Config = CompatRewardConfig

    @classmethod
    def build(cls, config: CompatRewardConfig) -> Reward:
        from slime_compat.reward import OldReward

        return OldReward(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        forms: dict[str, bool] = {"reward": False, "rewards_of_group": True}
        return [
            RewardExample(
                options={"path": f"slime_compat.written_before.{name}", "group": group},
                prompt="2+2=",
                label="4",
                responses=("4", "5", ""),
                rewards=(1.0, 0.0, 0.0),
            )
            for name, group in forms.items()
        ]


class CompatGenerator(GeneratorDriver):
    """A generate function that was written for THUDM's slime; its requests to the router go to the run's engines."""

    Config = CompatGeneratorConfig

    @classmethod
    def build(cls, config: CompatGeneratorConfig) -> Generator:
        from slime_compat.generator import OldGenerator

        return OldGenerator(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"path": "slime_compat.written_before.generate"})]


class CompatFilter(FilterDriver):
    """A dynamic sampling filter that was written for THUDM's slime."""

    Config = OldFunctionConfig

    @classmethod
    def build(cls, config: OldFunctionConfig) -> GroupFilter:
        from slime_compat.group_filter import OldFilter

        return OldFilter(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"path": "slime_compat.written_before.keep_unequal"})]
