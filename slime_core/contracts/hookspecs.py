"""Hooks for observers: one hook and one frozen event for each kind of thing that happens in a run.

Write a module (or a class) whose functions are marked with `hookimpl` and named like a hook, each taking `event`
(`step_trained` takes a `StepTrained`), and register it in the entry-point group `slime`. Observers never change what is
trained: events are frozen and return values are ignored; code that changes numbers is a plugin named in the config.

In every event `rollout_id` counts rollouts from 0, `version` is a policy version, and `seconds` is wall-clock time.
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
    from slime_core.types.report import EvalReport, Lap, TrainReport, WeightUpdateReport
    from slime_core.types.sample import SampleGroup

PROJECT: Final = "slime"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run of an event, so that an observer needs no state of its own to know where to write."""

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    """The resolved config, as JSON types."""
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
    """Sent when the run is resolved and checked, before anything is generated."""

    rollout_id: int
    """The first rollout of this attempt: 0, or where a resumed run continues."""
    version: int
    """Policy version that the run starts with."""
    plugins: tuple[str, ...] = ()
    """Every plugin in use, as `dist/name`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunReady(Event):
    """Sent when trainers and engines have started and engines have the trainers' weights. The first step follows."""

    lap: Lap
    """What the time since the program's start was spent on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunEnd(Event):
    """Sent at the end of the run, also when it fails or is interrupted."""

    rollout_id: int
    """Rollouts trained so far, over all attempts."""
    version: int
    error: BaseException | None = None
    """Why the run ends early; None: it is complete."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutStart(Event):
    """Sent before the groups of a rollout are collected; again if a checkpoint interrupted it."""

    rollout_id: int
    version: int
    """Policy version when it starts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutEnd(Event):
    """Sent when the groups of a rollout are complete. `version`: at its start; `seconds`: since `RolloutStart`."""

    rollout_id: int
    version: int
    groups: tuple[SampleGroup, ...]
    """The accepted groups, in submission order."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counters of the rollout, by metric name."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RejectedGroup:
    group: SampleGroup
    reason: str
    """Name of the filter that dropped it, or `surplus`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupsFinished(Event):
    """Sent before any group of a rollout is discarded; for one that a checkpoint interrupts, with the rejected groups."""

    rollout_id: int
    accepted: tuple[SampleGroup, ...]
    rejected: tuple[RejectedGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchReady(Event):
    """Sent when a batch has its log-probs and advantages, before it is trained on."""

    rollout_id: int
    version: int
    """Policy version that will be trained."""
    batch: Batch
    columns: TokenColumns
    """(M,) per response token: log-probs, values, advantages and weights, as far as the algorithm needs them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTrained(Event):
    """Sent after a rollout batch was trained on; `report.version` is the new policy version."""

    rollout_id: int
    report: TrainReport
    lap: Lap | None = None
    """What the time since the step before was spent on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateWeightsStart(Event):
    """Sent before engines are paused for a weight update to `version`."""

    version: int
    num_engines: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateWeightsEnd(Event):
    """Sent after all engines resumed with the new weights."""

    report: WeightUpdateReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointSaved(Event):
    """Sent when the checkpoint of policy `version` is complete and has its final name. `seconds`: for all of it."""

    rollout_id: int
    """Rollout that a run resumed from it starts with."""
    version: int
    path: Path
    seconds: float = 0.0
    blocked_seconds: float = 0.0
    """The part of `seconds` that the run waited for; smaller with `checkpoint.async_save`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvalDone(Event):
    """Sent after an evaluation over all sets."""

    report: EvalReport
    groups: Mapping[str, tuple[SampleGroup, ...]] = field(default_factory=dict)
    """Groups by name of the evaluation set."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineLost(Event):
    """Sent when an engine that died, hung or failed was taken out of service."""

    rollout_id: int
    """The rollout in progress, here and in the next two events."""
    engine_index: int
    error: BaseException
    redispatched: int = 0
    """Unfinished requests that are sent to other engines."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRestarted(Event):
    """Sent when another engine runs in place of a lost one, still without the run's weights."""

    rollout_id: int
    engine_index: int
    restarts: int
    """Restarts of this engine in this attempt, this one included."""
    pid: int | None = None
    """Process id of the server; None: not known."""
    seconds: float = 0.0
    """Time to stop the old engine and start this one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRecovered(Event):
    """Sent when the engine has the weights of `version` and is in service again."""

    rollout_id: int
    engine_index: int
    version: int
    seconds: float = 0.0
    """Since `EngineLost`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleFailed(Event):
    """Sent when a generator or a reward raised for a sample, which fails unless `will_retry`."""

    prompt: Prompt
    sample_index: int
    attempt: int
    """1 for the first try."""
    will_retry: bool
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventLoopBlocked(Event):
    """Sent after code that did not await blocked the event loop, so that nothing else of the run could continue."""

    seconds: float
    where: str
    """`file:line function > ...`, the innermost last; `rollout worker 1: ` in front if only its loop was blocked."""


EVENTS: Final = tuple(
    kind for kind in list(vars().values()) if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
)
"""All events above; a hook takes one of them."""

HOOK_NAMES: Final = tuple(event.hook for event in EVENTS)


@hookspec
def observe(event: Event) -> None:
    """Signature of every hook; return values are ignored."""


HookSpecs: Final = type("HookSpecs", (), dict.fromkeys(HOOK_NAMES, observe))
"""The hooks as pluggy requires them: a class with one method per hook."""
