"""What the driver and a worker send each other. Numbers identify groups, requests, calls and questions until they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from slime_core.config.part import PluginSpec
from slime_core.rollout.groups import GroupSettings
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
    timeout: float
    """Seconds that its event loop may be blocked."""

    @property
    def name(self) -> str:
        return f"rollout worker {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSetup:
    """Which groups a runner makes, and how."""

    settings: GroupSettings
    generator: str
    """`PluginSpec` as JSON."""


# ---------------------------------------------------------------- from the driver


class StartGroup(NamedTuple):
    number: int
    runner: bytes
    """A pickled `RunnerSetup`: equal ones share a runner."""
    prompt: Prompt
    kept: GroupColumns | None
    """Samples of an earlier attempt, or those to score."""
    score_only: bool


class StopGroups(NamedTuple):
    """Their responses end as they are."""

    numbers: tuple[int, ...]


class CancelGroup(NamedTuple):
    number: int


class Completed(NamedTuple):
    """`result`: a completion as `flat.COMPLETION`; an error is raised where the request was made."""

    number: int
    result: tuple[Any, ...] | Exception


class Call(NamedTuple):
    """For the engine's `EngineCaller`."""

    number: int
    asked: Any


class CancelCall(NamedTuple):
    number: int


class Versions(NamedTuple):
    """Policy versions whose tokens may be trained from now on."""

    trained: range


class Reply(NamedTuple):
    """To a `Question`."""

    number: int
    result: Any


class Close(NamedTuple):
    """The worker ends."""


# ---------------------------------------------------------------- from a worker


class Ready(NamedTuple):
    """`error`: why the worker cannot start."""

    error: Exception | None


class Request(NamedTuple):
    number: int
    group: int
    request: tuple[Any, ...]
    """As `flat.REQUEST`."""


class CancelRequest(NamedTuple):
    number: int


class AbortRequests(NamedTuple):
    request_ids: tuple[str, ...]


class Called(NamedTuple):
    number: int
    result: Any


class Generated(NamedTuple):
    """All responses of a group, perhaps without rewards."""

    number: int
    samples: GroupColumns


class Finished(NamedTuple):
    number: int
    rewards: RewardColumns
    trace: tuple[Any, ...] | None
    """As `flat.pack_trace`."""


class Failed(NamedTuple):
    """The group's task raised; None: it was cancelled."""

    number: int
    error: Exception | None


class ResponseFailed(NamedTuple):
    """See `SampleFailure`."""

    group: int
    sample_index: int
    attempt: int
    will_retry: bool
    error: Exception


class LoopReport(NamedTuple):
    """Of the thread that watches the worker's event loop; the only message on a socket of its own."""

    turns: bool
    blocked_s: float
    """Seconds that it has been blocked, or was until now; 0: it was not."""
    where: str
    """The code that blocks or blocked it, as `location_of` has it."""


class Question(NamedTuple):
    """A method of the `ServedEngines` that rewards query."""

    number: int
    method: str
    arguments: tuple[Any, ...]
