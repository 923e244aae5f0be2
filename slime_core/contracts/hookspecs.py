"""What observers can be told: one hook and one frozen event for each thing that happens in a run.

Write a module (or a class) whose functions are marked with `hookimpl` and named like a hook, each taking `event`
(`step_trained` takes a `StepTrained`), and register it in the entry-point group `slime`. Observers never change what is
trained: events are frozen, return values are ignored, and what changes numbers is a plugin that the config names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pluggy

if TYPE_CHECKING:
    from slime_core.types.batch import Batch, TokenColumns
    from slime_core.types.prompt import Prompt
    from slime_core.types.report import EvalReport, PublishReport, TrainReport
    from slime_core.types.sample import SampleGroup

PROJECT: Final = "slime"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Which run an event belongs to, so that an observer needs no state of its own to know where to write."""

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    """As resolved, JSON-like."""
    attempt: int = 1
    """1 for the first start, one more for each resume."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Event:
    """Base of all events; `StepTrained` belongs to the hook `step_trained`."""

    hook: ClassVar[str]
    run: Run

    def __init_subclass__(cls) -> None:
        cls.hook = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunStart(Event):
    """Everything is resolved and checked; nothing has been generated."""

    rollout_id: int
    """The first rollout of this attempt: 0, or where a resumed run goes on."""
    version: int
    """Policy version that the run starts with."""
    plugins: tuple[str, ...] = ()
    """Every plugin in use, as `dist/name`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunEnd(Event):
    """Also sent when the run fails or is interrupted."""

    rollout_id: int
    """Rollouts trained so far, over all attempts."""
    version: int
    error: BaseException | None = None
    """Why the run stops early; None: it is complete."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutStart(Event):
    rollout_id: int
    version: int
    """Of the weights that the engines hold when it starts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutEnd(Event):
    rollout_id: int
    version: int
    groups: tuple[SampleGroup, ...]
    """The accepted ones, in submission order."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RejectedGroup:
    group: SampleGroup
    reason: str
    """Which filter dropped it, or `surplus`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupsFinished(Event):
    """All that a rollout produced, before anything is thrown away. Of a step that a checkpoint breaks off, what was rejected
    until then comes at once, by itself."""

    rollout_id: int
    accepted: tuple[SampleGroup, ...]
    rejected: tuple[RejectedGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchReady(Event):
    """Scored and credited, about to be trained on."""

    rollout_id: int
    version: int
    batch: Batch
    columns: TokenColumns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTrained(Event):
    """One rollout batch has been trained on; `report.version` is the new policy version."""

    rollout_id: int
    report: TrainReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishStart(Event):
    version: int
    num_engines: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishEnd(Event):
    report: PublishReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointSaved(Event):
    """The folder is complete and has its final name."""

    rollout_id: int
    version: int
    path: Path
    seconds: float = 0.0
    blocked_seconds: float = 0.0
    """Of them those that the run waited for; fewer with `checkpoint.async_save`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvalDone(Event):
    report: EvalReport
    groups: Mapping[str, tuple[SampleGroup, ...]] = field(default_factory=dict)
    """By name of the evaluation set."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineLost(Event):
    """It died, hung or failed, and was taken out of service."""

    rollout_id: int
    engine_index: int
    error: BaseException
    redispatched: int = 0
    """Requests that it had not answered, and that other engines get."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRestarted(Event):
    """Another engine runs in its place; it has no weights of the run yet."""

    rollout_id: int
    engine_index: int
    restarts: int
    """Of this engine in this attempt."""
    pid: int | None = None
    """Of the process that serves."""
    seconds: float = 0.0
    """To stop the old one and start this one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRecovered(Event):
    """It has the weights and is in service again."""

    rollout_id: int
    engine_index: int
    version: int
    """Of the weights that it has been given."""
    seconds: float = 0.0
    """Since it was lost."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleFailed(Event):
    """A generator or a reward raised."""

    prompt: Prompt
    sample_index: int
    attempt: int
    """1 for the first try."""
    will_retry: bool
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoopHeld(Event):
    """Something did not await, and nothing else of the run went on meanwhile. Told when it is over."""

    seconds: float
    where: str
    """`file:line function > ...`, the innermost last."""


EVENTS: Final = tuple(
    kind for kind in list(vars().values()) if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
)
"""Every event above. A hook takes one of them, and what an observer returns is ignored."""

HOOK_NAMES: Final = tuple(event.hook for event in EVENTS)


@hookspec
def observe(event: Event) -> None:
    """The signature of every hook."""


HookSpecs: Final = type("HookSpecs", (), dict.fromkeys(HOOK_NAMES, observe))
"""The hooks, as pluggy takes them: a class with a method for each."""
