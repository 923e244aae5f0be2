"""What runs in a reward's worker process."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TypeAlias

from slime_core.config.part import PartSpec
from slime_core.contracts.reward import Outcome, Reward, RewardValue, ServedModel
from slime_core.errors import RewardError
from slime_core.registry import Registry
from slime_core.registry.plugin_file import PluginFile
from slime_core.types.sample import SampleGroup

Servers: TypeAlias = "tuple[ServedModel, ...] | None"
"""Those that a reward asks; None: it asks no engines of the run."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a reward raised on one group, as text: the exception itself may not travel."""

    message: str
    """A RewardError's own message; else the type and text."""
    told: bool
    """It was a RewardError, which says itself on which prompt, and what to type."""
    traceback: str
    outcome: Outcome = Outcome.WRONG


@dataclass(frozen=True, slots=True)
class Scored:
    """Answers in the order of the groups."""

    values: Sequence[Sequence[RewardValue] | Raised]
    seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """What a task raised outside the groups that it is about, or an answer that cannot travel."""

    error: Exception
    traceback: str


def serve(pipe: Connection) -> None:
    """The process: one task after the other, (function, arguments), as long as somebody sends any. Ctrl-C goes to the whole
    process group, but the run decides when its workers end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    while True:
        function, arguments = pipe.recv()
        pipe.send_bytes(answer_of(function, arguments))


def answer_of(function: Callable[..., object], arguments: Sequence[object]) -> bytes:
    """Pickled. An answer that cannot be is one of its own."""
    try:
        return bytes(ForkingPickler.dumps(function(*arguments)))
    except Exception as error:  # noqa: BLE001 - a reward is foreign code; what it raised is told where it was asked
        text = traceback.format_exc()
        try:
            # An exception may be pickled, and yet not be built again from that.
            pickle.loads(ForkingPickler.dumps(error))  # noqa: S301 - made here
        except Exception:  # noqa: BLE001 - as above
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return bytes(ForkingPickler.dumps(Failure(error, text)))


def end_with_parent() -> None:
    """A run that is killed, or ended by a second Ctrl-C, cannot stop a worker that is in the middle of a reward."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@functools.cache
def reward_of(spec: str, servers: Servers, plugin_files: tuple[PluginFile, ...]) -> Reward:
    """Built once in each worker process, and anew for other servers."""
    part = PartSpec.from_json(spec).resolve(Registry(plugin_files))
    reward: Reward = part.build() if servers is None else part.driver.build_asking(part.config, servers)
    return reward


def build_reward(spec: str, servers: Servers, plugin_files: tuple[PluginFile, ...]) -> None:
    reward_of(spec, servers, plugin_files)


def score_groups(
    spec: str, servers: Servers, plugin_files: tuple[PluginFile, ...], groups: Sequence[SampleGroup]
) -> Scored:
    """What one group makes the reward raise does not concern the others."""
    reward = reward_of(spec, servers, plugin_files)
    began = time.perf_counter()
    values = [score_group(reward, group) for group in groups]
    return Scored(values, time.perf_counter() - began)


def score_group(reward: Reward, group: SampleGroup) -> Sequence[RewardValue] | Raised:
    try:
        return list(reward.score(group))
    except RewardError as error:
        return Raised(str(error), True, traceback.format_exc(), Outcome(error.outcome))
    except Exception as error:  # noqa: BLE001 - a reward is foreign code; what it raised is told where it was asked
        return Raised(f"{type(error).__name__}: {error}", False, traceback.format_exc(), outcome_of(error))


def outcome_of(error: Exception) -> Outcome:
    """The class of an exception that is no RewardError."""
    if isinstance(error, TimeoutError):
        return Outcome.TIMEOUT
    return Outcome.INFRA if isinstance(error, ConnectionError) else Outcome.WRONG
