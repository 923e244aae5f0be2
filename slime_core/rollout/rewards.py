"""RewardPool: rewards run in worker processes with a time limit, never in the loop.

A reward that hangs costs its worker process, which is killed and replaced; one that raises or returns something that is
not a finite number is reported with the prompt it happened on.

Groups that come in together travel together, as many as take about PARCEL_SECONDS by what was measured: a message per
group would cost more than a fast reward itself, and a slow reward still gets its groups one by one.
"""

from __future__ import annotations

import asyncio
import math
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from slime_core.config.part import PartSpec
from slime_core.contracts.reward import Outcome, RewardFailure, RewardValue, SpanRewards
from slime_core.errors import RewardError, RewardTimeout, RewardUnavailable
from slime_core.registry.plugin_file import PluginFile
from slime_core.rollout.reward_process import RemoteTraceback, RewardProcess, WorkerDied, WorkerLate
from slime_core.rollout.reward_worker import Raised, Scored, Servers
from slime_core.rollout.served_engines import ServedEngines
from slime_core.types.sample import Sample, SampleGroup, SpanReward

WAY_ON: Final = "Mend the reward and start again, or say --on-reward-failure fail_sample to go on without it."
TIMEOUT_S: Final = 30.0
"""For a group, where neither the run nor the reward says how long it may take."""
PARCEL_SECONDS: Final = 0.02
LARGEST_PARCEL: Final = 64
ERROR_OF: Final = {
    Outcome.WRONG: RewardError,
    Outcome.TIMEOUT: RewardTimeout,
    Outcome.INFRA: RewardUnavailable,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one sample: a number, or why there is none."""

    value: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[SpanReward, ...] = ()
    failure: RewardError | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A group that waits for its rewards."""

    spec: str
    servers: Servers
    group: SampleGroup
    answer: asyncio.Future[Sequence[RewardValue] | Raised]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLimit:
    """How long a reward says that it may take."""

    seconds: Callable[[int], float | None]
    """For a group of so many samples."""
    follows: tuple[str, ...] = ()
    """The reward's options that decide it."""


class RewardPool:
    """One pool for all rewards of a run."""

    def __init__(self, plugin_files: Sequence[PluginFile], *, workers: int, timeout_s: float | None = None) -> None:
        """`timeout_s`: for one group of any reward; None: what each reward says."""
        self._plugin_files = tuple(plugin_files)
        self._timeout_s = timeout_s
        self._servers_of: dict[str, Servers] = {}
        self._own: dict[str, OwnLimit] = {}
        self.engines: ServedEngines | None = None
        """Of the model that some rewards ask."""
        self._waiting: list[Waiting] = []
        self._parcels: set[asyncio.Task[None]] = set()
        self._pace: dict[str, float] = {}
        """Seconds per group of each reward, as its last parcel took."""
        self._processes = [RewardProcess(self._plugin_files) for _ in range(workers)]
        # One that was used a moment ago has built more.
        self._free: queue.LifoQueue[RewardProcess] = queue.LifoQueue()
        for process in reversed(self._processes):
            self._free.put(process)
        self._threads = ThreadPoolExecutor(workers, "rewards")

    async def warm(self, spec: PartSpec, *, own: OwnLimit | None = None, asks_engines: bool = False) -> None:
        """Builds the reward in every worker. One that replaces another does so before a group's time begins. Raises what
        building it raises. `own`: its time, where the run says none. `asks_engines`: it is built with those of `engines`."""
        text = spec.to_json()
        self._servers_of[text] = None
        if asks_engines:
            assert self.engines is not None, "a reward that asks engines is bound with a model that they serve"
            self._servers_of[text] = await self.engines.servers()
        if own is not None:
            self._own[text] = own
        loop = asyncio.get_running_loop()
        building = [
            loop.run_in_executor(self._threads, process.build, text, self._servers_of[text])
            for process in self._processes
        ]
        try:
            await asyncio.gather(*building)
        except WorkerDied as error:
            raise RewardError(
                f'reward "{spec.name}": its worker process died while it was built (exit code {error.exitcode}).'
            ) from error

    async def judge(
        self, spec: PartSpec, group: SampleGroup, reward_key: str | None, *, retries: int = 0
    ) -> list[Verdict]:
        """What became of each sample, whichever state it is in. `retries`: how often the group is scored again when there
        was no answer in time, or something that the reward depends on was lost."""
        if not group.samples:
            return []
        where = f'reward "{spec.name}" on {group.prompt.origin or f"group {group.group_index}"}'
        text = spec.to_json()
        while True:
            servers = await self._servers(text)
            try:
                values = await self._values(text, servers, group, where)
                # Such failures say nothing if they are for the sake of servers that serve no longer.
                lost = any(isinstance(value, RewardFailure) and value.outcome != Outcome.WRONG for value in values)
                if not lost or not await self._replaced(servers):
                    break
            except RewardError as error:
                if error.outcome == Outcome.WRONG:
                    return [Verdict(failure=error)] * len(group.samples)
                if await self._replaced(servers):
                    continue
                if retries == 0:
                    return [Verdict(failure=error)] * len(group.samples)
                retries -= 1
        return [verdict_on(sample, v, reward_key, where) for sample, v in zip(group.samples, values, strict=True)]

    async def _servers(self, spec: str) -> Servers:
        """Those that the reward asks now, once there are any."""
        if self.engines is not None and self._servers_of.get(spec) is not None:
            self._servers_of[spec] = await self.engines.servers()
        return self._servers_of.get(spec)

    async def _replaced(self, servers: Servers) -> bool:
        return servers is not None and self.engines is not None and await self.engines.changed(servers)

    async def _values(self, spec: str, servers: Servers, group: SampleGroup, where: str) -> Sequence[RewardValue]:
        """One for each sample; RewardError if the group cannot be scored."""
        try:
            values = await self._ask(spec, servers, group)
        except WorkerLate:
            raise RewardTimeout(f"{where}: {self._late(spec, len(group.samples))}") from None
        except WorkerDied as error:
            raise RewardUnavailable(
                f"{where}: its worker process died (exit code {error.exitcode}). {WAY_ON}"
            ) from error
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"{where}: raised {type(error).__name__}: {error}. {WAY_ON}") from error
        if isinstance(values, Raised):
            text = values.message if values.told else f"{where}: raised {values.message}. {WAY_ON}"
            raise ERROR_OF[values.outcome](text) from RemoteTraceback(values.traceback)
        if len(values) != len(group.samples):
            raise RewardError(f"{where}: returned {len(values)} values for {len(group.samples)} samples.")
        return values

    def _limit(self, spec: str, num_samples: int) -> float:
        """Seconds for a group: what the run says wins over what the reward says."""
        if self._timeout_s is not None:
            return self._timeout_s
        own = self._own[spec].seconds(num_samples) if spec in self._own else None
        return TIMEOUT_S if own is None else own

    def _late(self, spec: str, num_samples: int) -> str:
        told = f"no answer within {self._limit(spec, num_samples):g} s"
        follows = self._own[spec].follows if spec in self._own and self._timeout_s is None else ()
        if follows:
            told += (
                f", the time that the reward's {', '.join(follows)} give {num_samples} samples. Change these, or say"
            )
        else:
            told += ". Raise"
        return f"{told} --reward-timeout, or --on-reward-failure fail_sample to go on without it."

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()
        self._threads.shutdown()

    async def _ask(self, spec: str, servers: Servers, group: SampleGroup) -> Sequence[RewardValue] | Raised:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send_all)
        waiting = Waiting(spec, servers, group, loop.create_future())
        self._waiting.append(waiting)
        return await waiting.answer

    def _send_all(self) -> None:
        of_spec: dict[tuple[str, Servers], list[Waiting]] = {}
        for waiting in self._waiting:
            of_spec.setdefault((waiting.spec, waiting.servers), []).append(waiting)
        self._waiting = []
        for (spec, _), members in of_spec.items():
            pace = self._pace.get(spec, math.inf)
            size = max(1, min(LARGEST_PARCEL, int(PARCEL_SECONDS / max(pace, 1e-9))))
            for start in range(0, len(members), size):
                self._send(members[start : start + size])

    def _send(self, members: Sequence[Waiting]) -> None:
        parcel = asyncio.create_task(self._deliver(members))
        self._parcels.add(parcel)
        parcel.add_done_callback(self._parcels.discard)

        def give_up(_: asyncio.Future[Sequence[RewardValue] | Raised]) -> None:
            if all(member.answer.cancelled() for member in members):
                parcel.cancel()

        for member in members:
            member.answer.add_done_callback(give_up)

    async def _deliver(self, members: Sequence[Waiting]) -> None:
        """The answers to their groups. Where a whole parcel is lost, each of its groups is sent again on its own, so
        that the one that hangs, or takes the worker down, is the one that fails."""
        spec, groups = members[0].spec, [member.group for member in members]
        limit = max(self._limit(spec, len(group.samples)) for group in groups)
        asked_by = object()
        try:
            future = self._threads.submit(self._score, spec, members[0].servers, groups, limit, asked_by)
            scored = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            for process in self._processes:
                process.kill(asked_by)
            raise
        except Exception as error:  # noqa: BLE001 - whatever comes back reaches those who wait for it
            left = [member for member in members if not member.answer.done()]
            if len(members) == 1:
                for member in left:
                    member.answer.set_exception(error)
            else:
                self._pace.pop(spec, None)
                for member in left:
                    self._send([member])
            return
        self._pace[spec] = scored.seconds / len(members)
        for member, values in zip(members, scored.values, strict=True):
            if not member.answer.done():
                member.answer.set_result(values)

    def _score(
        self, spec: str, servers: Servers, groups: Sequence[SampleGroup], limit_s: float, asked_by: object
    ) -> Scored:
        """In a thread. There are as many as processes, so one is free."""
        process = self._free.get_nowait()
        try:
            return process.score(spec, servers, groups, timeout_s=limit_s, asked_by=asked_by)
        finally:
            self._free.put(process)


def verdict_on(sample: Sample, value: RewardValue, reward_key: str | None, where: str) -> Verdict:
    """What the value that a reward returned says."""
    try:
        done = rewarded(sample, value, reward_key, where)
    except RewardError as error:
        return Verdict(failure=error)
    return Verdict(value=done.reward, parts=done.reward_parts, spans=done.span_rewards)


def rewarded(sample: Sample, value: RewardValue, reward_key: str | None, where: str) -> Sample:
    """The sample with its reward; a mapping's numbers are kept as parts. RewardError if it is none."""
    if isinstance(value, RewardFailure):
        raise ERROR_OF[value.outcome](f"{where}: {value.message}. {WAY_ON}")
    if isinstance(value, SpanRewards):
        spans = tuple(span_of(sample, span, where) for span in value.spans)
        total = finite(value.outcome, where) + math.fsum(span.value for span in spans)
        return replace(sample, reward=total, reward_parts={}, span_rewards=spans)
    parts: Mapping[str, float] = {}
    if isinstance(value, Mapping):
        parts = {key: finite(number, where) for key, number in value.items()}
        if reward_key is None:
            raise RewardError(f"{where}: returned {sorted(parts)}; say which one counts with --reward-key.")
        if reward_key not in parts:
            raise RewardError(f'{where}: returned no "{reward_key}" (--reward-key); there is {sorted(parts)}.')
        value = parts[reward_key]
    return replace(sample, reward=finite(value, where), reward_parts=parts)


def span_of(sample: Sample, span: SpanReward, where: str) -> SpanReward:
    start, end, value = span
    if not 0 <= start < end <= sample.response_length:
        raise RewardError(
            f"{where}: rewards tokens {start} to {end} of a response of {sample.response_length}; spans are [start, end) "
            "with at least one token."
        )
    return SpanReward(int(start), int(end), finite(value, where))


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
