"""RewardPool: rewards run in worker processes with a time limit, never in the loop.

A reward that hangs costs its worker process, which is killed and replaced; one that raises or returns something that is
not a finite number is reported with the prompt it happened on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import Final

from pebble import ProcessExpired, ProcessPool

from slime_core.config.bound import PartSpec
from slime_core.contracts.reward import Reward, RewardValue
from slime_core.errors import RewardError
from slime_core.plugin_file import PluginFile
from slime_core.registry import Registry
from slime_core.types.sample import Sample, SampleGroup, Status

WAY_ON: Final = "Mend the reward and start again, or say --on-reward-failure fail_sample to go on without it."


class RewardPool:
    """One pool for all rewards of a run."""

    def __init__(self, plugin_files: Sequence[PluginFile], *, workers: int, timeout_s: float) -> None:
        self._plugin_files = tuple(plugin_files)
        self._timeout_s = timeout_s
        # Pickled whenever a worker starts, so one that replaces another builds what is known by then.
        self._specs: list[str] = []
        # spawn: forking a process that has torch's threads can deadlock.
        self._pool = ProcessPool(
            max_workers=workers,
            context=multiprocessing.get_context("spawn"),
            initializer=start_worker,
            initargs=(self._specs, self._plugin_files),
        )

    async def warm(self, spec: PartSpec) -> None:
        """Imports the reward in every worker, now and when it is replaced, so that no group's time limit runs while it
        does. Raises what building it raises."""
        self._specs.append(spec.to_json())
        # The first task starts the workers, and the threads that replace them.
        with interrupts_held_back():
            future = self._pool.schedule(build_reward, args=(spec.to_json(), self._plugin_files))
        await asyncio.wrap_future(future)

    async def score(self, spec: PartSpec, group: SampleGroup, reward_key: str | None) -> SampleGroup:
        """The group with rewards. Aborted and failed samples, and those that have a reward already, are not scored.

        Raises RewardError: what went wrong, on which prompt.
        """
        asked = [n for n, sample in enumerate(group.samples) if is_scored(sample)]
        if not asked:
            return group
        part = replace(group, samples=tuple(group.samples[n] for n in asked))
        where = f'reward "{spec.name}" on {group.prompt.origin or f"group {group.group_index}"}'
        future = self._pool.schedule(
            score_group, args=(spec.to_json(), self._plugin_files, part), timeout=self._timeout_s
        )
        try:
            values = await asyncio.wrap_future(future)
        except FutureTimeoutError:
            raise RewardError(
                f"{where}: no answer within {self._timeout_s:g} s. Raise --reward-timeout, or --on-reward-failure "
                "fail_sample to go on without it."
            ) from None
        except ProcessExpired as error:
            raise RewardError(f"{where}: its worker process died (exit code {error.exitcode}). {WAY_ON}") from error
        except asyncio.CancelledError:
            future.cancel()
            raise
        except RewardError:
            # It says itself on which prompt, and what to type.
            raise
        except Exception as error:
            raise RewardError(f"{where}: raised {type(error).__name__}: {error}. {WAY_ON}") from error
        samples = list(group.samples)
        if len(values) != len(asked):
            raise RewardError(f"{where}: returned {len(values)} values for {len(asked)} samples.")
        for n, value in zip(asked, values, strict=True):
            samples[n] = rewarded(samples[n], value, reward_key, where)
        return replace(group, samples=tuple(samples))

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()


def is_scored(sample: Sample) -> bool:
    return sample.reward is None and sample.status not in (Status.ABORTED, Status.FAILED)


def rewarded(sample: Sample, value: RewardValue, reward_key: str | None, where: str) -> Sample:
    """The sample with its reward; a mapping's numbers are kept as parts."""
    parts: Mapping[str, float] = {}
    if isinstance(value, Mapping):
        parts = {key: finite(number, where) for key, number in value.items()}
        if reward_key is None:
            raise RewardError(f"{where}: returned {sorted(parts)}; say which one counts with --reward-key.")
        if reward_key not in parts:
            raise RewardError(f'{where}: returned no "{reward_key}" (--reward-key); there is {sorted(parts)}.')
        value = parts[reward_key]
    return replace(sample, reward=finite(value, where), reward_parts=parts)


def finite(value: object, where: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = None
    # Text converts too, but a reward that returns some did not mean a number.
    if number is None or isinstance(value, (str, bytes)):
        raise RewardError(f"{where}: returned {value!r}, which is not a number.")
    if not math.isfinite(number):
        raise RewardError(f"{where}: returned {number}; rewards must be finite.")
    return number


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """What is started meanwhile never sees Ctrl-C: a worker that has not come to `start_worker` yet would end with a
    traceback."""
    # Started with the first process, and lets the signals in again when it is.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(specs: Sequence[str], plugin_files: tuple[PluginFile, ...]) -> None:
    """Ctrl-C goes to the whole process group, but the run decides when its workers end. Then, what takes time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for spec in specs:
        # It says why when it is called; here it would only break the pool.
        with contextlib.suppress(Exception):
            build_reward(spec, plugin_files)


@functools.cache
def reward_of(spec: str, plugin_files: tuple[PluginFile, ...]) -> Reward:
    """Built once in each worker process."""
    reward: Reward = PartSpec.from_json(spec).resolve(Registry(plugin_files)).build()
    return reward


def build_reward(spec: str, plugin_files: tuple[PluginFile, ...]) -> None:
    reward_of(spec, plugin_files)


def score_group(spec: str, plugin_files: tuple[PluginFile, ...], group: SampleGroup) -> Sequence[RewardValue]:
    return list(reward_of(spec, plugin_files).score(group))
