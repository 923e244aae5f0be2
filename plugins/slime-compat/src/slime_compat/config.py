"""Options of slime-compat."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath

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
