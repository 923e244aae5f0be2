"""Functions that run in a reward's worker process."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TypeAlias

from slime_core.atomic_io.lasting_stream import lasting_output
from slime_core.config.part import PluginSpec
from slime_core.contracts.reward import Outcome, Reward, RewardValue, ServedModel
from slime_core.errors import RewardError
from slime_core.registry import Registry
from slime_core.registry.boundary import error_text, foreign, held, shown
from slime_core.registry.plugin_file import PluginFile
from slime_core.types.sample import SampleGroup

Servers: TypeAlias = "tuple[ServedModel, ...] | None"
"""Servers that a reward queries; None: it queries no engines of the run."""


@dataclass(frozen=True, slots=True)
class Raised:
    """Exception of a reward for one group, as text: the exception itself may not be picklable."""

    message: str
    """The message of a RewardError; else what happened, such as `raised ValueError: no digits`."""
    is_reward_error: bool
    """It was a RewardError, whose message has the prompt and a fix."""
    traceback: str
    outcome: Outcome = Outcome.WRONG


@dataclass(frozen=True, slots=True)
class Scored:
    """Values in the order of the groups."""

    values: Sequence[Sequence[RewardValue] | Raised]
    seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Exception of a task outside of scoring a group, or of pickling its result."""

    error: Exception
    traceback: str


def serve(pipe: Connection) -> None:
    """Main loop: runs tasks (function, arguments) from the pipe. Ignores Ctrl-C and a closed terminal: the run ends it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    # A reward that prints must not fail because its output has no reader. The pipe ends with the parent.
    with lasting_output(), contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            pipe.send_bytes(call_and_pickle(function, arguments))


def call_and_pickle(function: Callable[..., object], arguments: Sequence[object]) -> bytes:
    """Calls the function and pickles the result; on an error, or for a result that is not picklable, a `Failure`."""
    with held() as failed:
        pickled = bytes(ForkingPickler.dumps(function(*arguments)))
    if (error := failed.error) is None:
        return pickled
    text = "".join(traceback.format_exception(failed.raised))
    with held() as unpicklable:
        # Some exceptions can be pickled but not unpickled.
        pickle.loads(ForkingPickler.dumps(error))  # noqa: S301 - made here
    if unpicklable.error is not None:
        error = RuntimeError(error_text(error))
    return bytes(ForkingPickler.dumps(Failure(error, text)))


def end_with_parent() -> None:
    """Exits when the parent ends: a killed run cannot stop a worker that is inside a reward."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@functools.cache
def reward_of(spec: str, servers: Servers, plugin_files: tuple[PluginFile, ...]) -> Reward:
    """Builds the reward once per worker process and set of servers."""
    part = PluginSpec.from_json(spec).resolve(Registry(plugin_files))
    with foreign(part.title, "build"):
        reward: Reward = part.build() if servers is None else part.driver.build_with_servers(part.config, servers)
    return reward


def build_reward(spec: str, servers: Servers, plugin_files: tuple[PluginFile, ...]) -> None:
    reward_of(spec, servers, plugin_files)


def score_groups(
    spec: str, servers: Servers, plugin_files: tuple[PluginFile, ...], groups: Sequence[SampleGroup]
) -> Scored:
    """Scores each group; an exception for one group does not affect the others."""
    reward = reward_of(spec, servers, plugin_files)
    began = time.perf_counter()
    values = [score_group(reward, group) for group in groups]
    return Scored(values, time.perf_counter() - began)


def score_group(reward: Reward, group: SampleGroup) -> Sequence[RewardValue] | Raised:
    with held() as failed:
        returned: object = reward.score(group)
        values = list(returned) if isinstance(returned, Iterable) else None
    if (error := failed.raised) is None:
        if values is None:
            return Raised(f"returned {shown(returned)}, not one value for each sample", False, "")
        return values
    text = "".join(traceback.format_exception(error))
    if isinstance(error, RewardError):
        return Raised(str(error), True, text, Outcome(error.outcome))
    return Raised(f"raised {error_text(error)}", False, text, outcome_of(error))


def outcome_of(error: BaseException) -> Outcome:
    """Outcome of an exception that is no RewardError."""
    if isinstance(error, TimeoutError):
        return Outcome.TIMEOUT
    return Outcome.INFRA if isinstance(error, ConnectionError) else Outcome.WRONG
