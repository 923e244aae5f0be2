"""RewardPool: rewards run in worker processes with a time limit, never in the event loop.

The worker process of a reward that hangs is killed and replaced; a reward that raises, or does not return a finite number, is
reported with the prompt.

Groups that arrive together are sent together, as many as take about PARCEL_SECONDS by the last measurement: one message per
group would cost more than a fast reward itself, and a slow reward still gets its groups one by one.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from slime_core.config.part import PluginSpec
from slime_core.contracts.reward import Outcome, RewardFailure, RewardValue, SpanRewards
from slime_core.errors import RewardError, RewardTimeout, RewardUnavailable
from slime_core.registry.boundary import error_text, foreign, held, shown
from slime_core.registry.plugin_file import PluginFile
from slime_core.rollout.reward_process import RemoteTraceback, RewardProcess, WorkerDied, WorkerLate
from slime_core.rollout.reward_worker import Raised, Scored, Servers
from slime_core.rollout.served_engines import ServedEngines
from slime_core.types.sample import Sample, SampleGroup, SpanReward

REWARD_FIX: Final = "Fix the reward and start again, or pass --on-reward-failure fail_sample to continue without it."
TIMEOUT_S: Final = 30.0
"""Time limit of a group if neither the run nor the reward sets one."""
PARCEL_SECONDS: Final = 0.02
LARGEST_PARCEL: Final = 64
ERROR_OF: Final = {
    Outcome.WRONG: RewardError,
    Outcome.TIMEOUT: RewardTimeout,
    Outcome.INFRA: RewardUnavailable,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Result of one sample: a number, or why there is none."""

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
    values: asyncio.Future[Sequence[RewardValue] | Raised]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLimit:
    """Time limit that a reward declares (`RewardDriver.timeout_s`)."""

    seconds: Callable[[int], float | None]
    """By the number of samples in the group."""
    follows: tuple[str, ...] = ()
    """Options of the reward that it depends on."""


class RewardPool:
    """One pool for all rewards of a run."""

    def __init__(self, plugin_files: Sequence[PluginFile], *, workers: int, timeout_s: float | None = None) -> None:
        """`timeout_s`: for one group of any reward; None: the limit of each reward."""
        self._plugin_files = tuple(plugin_files)
        self._timeout_s = timeout_s
        self._servers_of: dict[str, Servers] = {}
        self._own: dict[str, OwnLimit] = {}
        self.engines: ServedEngines | None = None
        """Engines of the model that some rewards query."""
        self._waiting: list[Waiting] = []
        self._parcels: set[asyncio.Task[None]] = set()
        self._pace: dict[str, float] = {}
        """Seconds per group of each reward, measured on its last parcel."""
        self._processes = [RewardProcess(self._plugin_files) for _ in range(workers)]
        # The process used last has most rewards built.
        self._free: queue.LifoQueue[RewardProcess] = queue.LifoQueue()
        for process in reversed(self._processes):
            self._free.put(process)
        self._threads = ThreadPoolExecutor(workers, "rewards")

    async def warm(self, spec: PluginSpec, *, own: OwnLimit | None = None, needs_reward_model: bool = False) -> None:
        """Builds the reward in every worker; a worker that replaces another builds it before a group's time begins. Raises the
        errors of building it. `own`: its time limit if the run sets none. `needs_reward_model`: build it with the servers
        of `engines`."""
        text = spec.to_json()
        self._servers_of[text] = None
        if needs_reward_model:
            assert self.engines is not None, "a reward that queries engines is bound with a model that they serve"
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
        self, spec: PluginSpec, group: SampleGroup, reward_key: str | None, *, retries: int = 0
    ) -> list[RewardResult]:
        """Results by sample, whatever its status. `retries`: repeats after a timeout or the failure of a dependency."""
        if not group.samples:
            return []
        where = f'reward "{spec.name}" on {group.prompt.origin or f"group {group.group_index}"}'
        text = spec.to_json()
        while True:
            servers = await self._servers(text)
            try:
                values = await self._values(text, servers, group, where)
                # Failures because of servers that are out of service do not count.
                lost = any(isinstance(value, RewardFailure) and value.outcome != Outcome.WRONG for value in values)
                if not lost:
                    break
                if await self._replaced(servers):
                    continue
                if retries == 0:
                    break
                retries -= 1
            except RewardError as error:
                if error.outcome == Outcome.WRONG:
                    return [RewardResult(failure=error)] * len(group.samples)
                if await self._replaced(servers):
                    continue
                if retries == 0:
                    return [RewardResult(failure=error)] * len(group.samples)
                retries -= 1
        return [verdict_on(sample, v, reward_key, where) for sample, v in zip(group.samples, values, strict=True)]

    async def _servers(self, spec: str) -> Servers:
        """Servers that the reward queries now; waits until there is one."""
        if self.engines is not None and self._servers_of.get(spec) is not None:
            self._servers_of[spec] = await self.engines.servers()
        return self._servers_of.get(spec)

    async def _replaced(self, servers: Servers) -> bool:
        return servers is not None and self.engines is not None and await self.engines.changed(servers)

    async def _values(self, spec: str, servers: Servers, group: SampleGroup, where: str) -> Sequence[RewardValue]:
        """Returns one value per sample; raises RewardError if the group cannot be scored."""
        try:
            values = await self._ask(spec, servers, group)
        except WorkerLate:
            raise RewardTimeout(f"{where}: {self._late(spec, len(group.samples))}") from None
        except WorkerDied as error:
            raise RewardUnavailable(
                f"{where}: its worker process died (exit code {error.exitcode}). {REWARD_FIX}"
            ) from error
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"{where}: raised {error_text(error)}. {REWARD_FIX}") from error
        if isinstance(values, Raised):
            text = values.message if values.is_reward_error else f"{where}: {values.message}. {REWARD_FIX}"
            raise ERROR_OF[values.outcome](text) from RemoteTraceback(values.traceback)
        if len(values) != len(group.samples):
            raise RewardError(f"{where}: returned {len(values)} values for {len(group.samples)} samples.")
        return values

    def _limit(self, spec: str, num_samples: int) -> float:
        """Time limit of a group in seconds: the run's, else the reward's, else TIMEOUT_S."""
        if self._timeout_s is not None:
            return self._timeout_s
        if spec not in self._own:
            return TIMEOUT_S
        with foreign(PluginSpec.from_json(spec).name, f"timeout_s of {num_samples} samples", error=RewardError):
            own = self._own[spec].seconds(num_samples)
            return TIMEOUT_S if own is None else float(own)

    def _late(self, spec: str, num_samples: int) -> str:
        text = f"no response within {self._limit(spec, num_samples):g} s"
        follows = self._own[spec].follows if spec in self._own and self._timeout_s is None else ()
        if follows:
            text += (
                f", the time that the reward's {', '.join(follows)} give {num_samples} samples. Change these, or pass"
            )
        else:
            text += ". Raise"
        return f"{text} --reward-timeout, or --on-reward-failure fail_sample to continue without it."

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
        return await waiting.values

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
            if all(member.values.cancelled() for member in members):
                parcel.cancel()

        for member in members:
            member.values.add_done_callback(give_up)

    async def _deliver(self, members: Sequence[Waiting]) -> None:
        """Scores a parcel and sets the values of its groups. If a whole parcel is lost, each group is sent again on its own, so
        that only the group that hangs, or kills the worker, fails."""
        spec, groups = members[0].spec, [member.group for member in members]
        asked_by = threading.Event()
        try:
            with held() as failed:
                limit = max(self._limit(spec, len(group.samples)) for group in groups)
                future = self._threads.submit(self._score, spec, members[0].servers, groups, limit, asked_by)
                scored = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            for process in self._processes:
                process.kill(asked_by)
            raise
        if failed.error is not None:
            left = [member for member in members if not member.values.done()]
            if len(members) == 1:
                for member in left:
                    member.values.set_exception(failed.error)
            else:
                self._pace.pop(spec, None)
                for member in left:
                    self._send([member])
            return
        self._pace[spec] = scored.seconds / len(members)
        for member, values in zip(members, scored.values, strict=True):
            if not member.values.done():
                member.values.set_result(values)

    def _score(
        self, spec: str, servers: Servers, groups: Sequence[SampleGroup], limit_s: float, asked_by: threading.Event
    ) -> Scored:
        """Runs in a thread. There are as many threads as processes, so one process is free."""
        process = self._free.get_nowait()
        try:
            return process.score(spec, servers, groups, timeout_s=limit_s, asked_by=asked_by)
        finally:
            self._free.put(process)


def verdict_on(sample: Sample, value: RewardValue, reward_key: str | None, where: str) -> RewardResult:
    """Result from the value that a reward returned."""
    if type(value) is float and math.isfinite(value):
        return RewardResult(value=value)
    try:
        # The value is foreign: also reading it may raise.
        with foreign(where, "its value", error=RewardError):
            return result_of(sample, value, reward_key, where)
    except RewardError as error:
        return RewardResult(failure=error)


def result_of(sample: Sample, value: RewardValue, reward_key: str | None, where: str) -> RewardResult:
    """The number; numbers of a mapping are kept as parts. Raises RewardError for an invalid value."""
    if isinstance(value, RewardFailure):
        raise ERROR_OF[value.outcome](f"{where}: {value.message}. {REWARD_FIX}")
    if isinstance(value, SpanRewards):
        spans = tuple(span_of(sample, span, where) for span in value.spans)
        total = finite(finite(value.outcome, where) + math.fsum(span.value for span in spans), where)
        return RewardResult(value=total, spans=spans)
    parts: Mapping[str, float] = {}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise RewardError(f"{where}: returned a number named {shown(wrong[0])}; names are texts.")
        parts = {key: finite(number, where) for key, number in value.items()}
        if reward_key is None:
            raise RewardError(f"{where}: returned {sorted(parts)}; pass one of them as --reward-key.")
        if reward_key not in parts:
            raise RewardError(f'{where}: returned no "{reward_key}" (--reward-key); there is {sorted(parts)}.')
        value = parts[reward_key]
    return RewardResult(value=finite(value, where), parts=parts)


def span_of(sample: Sample, span: SpanReward, where: str) -> SpanReward:
    start, end, value = span
    if not 0 <= start < end <= sample.response_length:
        raise RewardError(
            f"{where}: rewards tokens {start} to {end} of a response of {sample.response_length}; spans are [start, end) "
            "with at least one token."
        )
    return SpanReward(int(start), int(end), finite(value, where))


def finite(value: object, where: str) -> float:
    with held() as failed:
        number = float(value)  # type: ignore[arg-type]
    if isinstance(failed.error, OverflowError):
        raise RewardError(f"{where}: returned a number too large for a float.")
    # float() accepts text too, but a reward that returns text is wrong.
    if failed.error is not None or isinstance(value, (str, bytes)):
        raise RewardError(f"{where}: returned {shown(value)}, which is not a number.")
    if not math.isfinite(number):
        raise RewardError(f"{where}: returned {number}; rewards must be finite.")
    return number
