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
    """Folders in which to look for its module, after the interpreter's own path."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Attributes of the function's argument `args`."""


class AskingFunctionConfig(OldFunctionConfig):
    """Options of functions that may send requests. Filters may not: they run in the event loop."""

    request_timeout: float = Field(REQUEST_TIMEOUT_S, gt=0)
    """Timeout in seconds of one request by `post` or `get` to anything but the run's engines."""


class CompatRewardConfig(AskingFunctionConfig):
    group: bool = False
    """True: the function takes (args, samples), the samples of a group, and returns a list of rewards."""


class CompatGeneratorConfig(AskingFunctionConfig):
    missing_log_probs: Literal["error", "zero"] = "error"
    """How to handle trained tokens without rollout_log_probs that no engine of this episode generated at their position, such
    as text that was tokenized again. error: the sample fails, and the error names the first of them. zero: they are trained
    with log-prob 0, which is right only if nothing reads the rollout's log-probs; their metrics are wrong then."""


class VerlRewardConfig(DriverConfig):
    path: RunPath
    """Python file of the function; `verl`: verl's own functions, which it chooses by data_source, if verl is installed."""
    function: str = Field("compute_score", min_length=1)
    """Its name."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of every call."""


class TrlRewardConfig(DriverConfig):
    path: str = Field(min_length=1)
    """Dotted path of the function: package.module.function."""
    python_path: tuple[RunPath, ...] = ()
    """Folders in which to look for its module, after the interpreter's own path."""
