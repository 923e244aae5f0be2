"""What the driver and a worker send each other. Numbers identify groups, requests, calls and questions until they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_core.config.part import PluginSpec
from slime_core.rollout.groups import GroupSettings
from slime_core.rollout.trace import GroupTrace
from slime_core.types.completion import Completion, GenerateRequest
from slime_core.types.prompt import Prompt
from slime_core.workers.agreement import Agreement
from slime_rollout_workers.columns import GroupColumns, RewardColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker is started with."""

    number: int
    agreement: Agreement
    engine: PluginSpec
    model_path: str
    """Folder of the tokenizer."""
    trust_remote_code: bool
    generators: tuple[PluginSpec, ...]
    rewards: tuple[PluginSpec, ...]
    reward_workers: int
    reward_timeout: float | None
    max_calls: int
    """How many calls to servers it makes at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSetup:
    """Which groups a runner makes, and how."""

    settings: GroupSettings
    generator: str
    """`PluginSpec` as JSON."""


# ---------------------------------------------------------------- from the driver


@dataclass(frozen=True, slots=True)
class StartGroup:
    number: int
    runner: bytes
    """A pickled `RunnerSetup`: equal ones share a runner."""
    prompt: Prompt
    kept: GroupColumns | None
    """Samples of an earlier attempt, or those to score."""
    score_only: bool


@dataclass(frozen=True, slots=True)
class StopGroups:
    """Their responses end as they are."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelGroup:
    number: int


@dataclass(frozen=True, slots=True)
class Completed:
    """`result`: an error is raised where the request was made."""

    number: int
    result: Completion | Exception


@dataclass(frozen=True, slots=True)
class Call:
    """For the engine's `EngineCaller`."""

    number: int
    asked: Any


@dataclass(frozen=True, slots=True)
class CancelCall:
    number: int


@dataclass(frozen=True, slots=True)
class Versions:
    """Policy versions whose tokens may be trained from now on."""

    trained: range


@dataclass(frozen=True, slots=True)
class Reply:
    """To a `Question`."""

    number: int
    result: Any


@dataclass(frozen=True, slots=True)
class Close:
    pass


# ---------------------------------------------------------------- from a worker


@dataclass(frozen=True, slots=True)
class Ready:
    """`error`: why the worker cannot start."""

    error: Exception | None


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    group: int
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class CancelRequest:
    number: int


@dataclass(frozen=True, slots=True)
class AbortRequests:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Called:
    number: int
    result: Any


@dataclass(frozen=True, slots=True)
class Generated:
    """All responses of a group, perhaps without rewards."""

    number: int
    samples: GroupColumns


@dataclass(frozen=True, slots=True)
class Finished:
    number: int
    rewards: RewardColumns
    trace: GroupTrace | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The group's task raised; None: it was cancelled."""

    number: int
    error: Exception | None


@dataclass(frozen=True, slots=True)
class ResponseFailed:
    """See `SampleFailure`."""

    group: int
    index: int
    attempt: int
    will_retry: bool
    error: Exception


@dataclass(frozen=True, slots=True)
class Question:
    """A method of the `ServedEngines` that rewards query."""

    number: int
    method: str
    arguments: tuple[Any, ...]
