"""Worker: what runs in the process of a rollout worker. It runs the kernel's GroupRunner, whose requests go to the driver."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.atomic_io.lasting_stream import lasting_output
from slime_core.config.part import PluginSpec
from slime_core.contracts.engine import EngineCaller
from slime_core.contracts.generator import Generator
from slime_core.contracts.reward import ServedModel
from slime_core.controller.gc_control import frozen_gc, gc_paused
from slime_core.data.model_folder import load_tokenizer
from slime_core.registry.boundary import foreign, held, name_of
from slime_core.rollout.groups import GroupRunner, RunningGroup, SampleFailure
from slime_core.rollout.reward_worker import end_with_parent
from slime_core.rollout.rewards import OwnLimit, RewardPool
from slime_core.rollout.served_engines import ServedEngines
from slime_core.rollout.trace import GroupTrace
from slime_core.types.sample import SampleGroup
from slime_rollout_workers.channel import Channel, Send
from slime_rollout_workers.columns import GroupColumns, RewardColumns
from slime_rollout_workers.flat import pack_trace
from slime_rollout_workers.group_client import GroupClient, Requests
from slime_rollout_workers.hang_watch import report_interval
from slime_rollout_workers.loop_reports import LoopReports
from slime_rollout_workers.messages import (
    Call,
    Called,
    CancelCall,
    CancelGroup,
    Close,
    Completed,
    Failed,
    Finished,
    Generated,
    Question,
    Ready,
    Reply,
    ResponseFailed,
    RunnerSetup,
    StartGroup,
    StopGroups,
    Versions,
    WorkerSetup,
)
from slime_rollout_workers.travelling_error import packed, raised_here
from slime_rollout_workers.unsendable import unsendable_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def serve(end: socket.socket, reports: socket.socket, setup: WorkerSetup) -> None:
    """The process's main function. The driver decides when it ends: it ignores Ctrl-C and a closed terminal."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    with lasting_output():
        asyncio.run(run(end, reports, setup))


async def run(end: socket.socket, reports: socket.socket, setup: WorkerSetup) -> None:
    with LoopReports(reports, report_interval(setup.timeout)):
        await work(end, setup)


async def work(end: socket.socket, setup: WorkerSetup) -> None:
    channel = await Channel.over(end)
    worker = Worker(setup, channel.send)
    reading = asyncio.create_task(channel.read(worker.take))
    try:
        with held() as failed:
            await worker.open()
        channel.send(Ready(failed.error and packed(failed.error)))
        closed = asyncio.create_task(worker.closed.wait())
        with frozen_gc():
            await asyncio.wait({reading, closed}, return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        if reading.done():
            # A message that could not be taken ends the process, with the traceback on stderr.
            reading.result()
    finally:
        await worker.close()
        reading.cancel()
        await channel.close()


class DriversEngines(ServedEngines):
    """The engines that rewards query, which the driver watches."""

    def __init__(self, ask: Callable[[str, Sequence[Any]], Awaitable[Any]]) -> None:
        self._ask = ask

    async def servers(self) -> tuple[ServedModel, ...]:
        servers: tuple[ServedModel, ...] = await self._ask("servers", ())
        return servers

    async def changed(self, asked: Sequence[ServedModel]) -> bool:
        return bool(await self._ask("changed", (tuple(asked),)))


class Worker:
    def __init__(self, setup: WorkerSetup, send: Send) -> None:
        self._setup = setup
        self._send = send
        self._requests = Requests(send)
        self._registry = setup.agreement.registry()
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._generators: dict[str, Generator] = {}
        self._rewards = RewardPool(
            setup.agreement.plugin_files, workers=setup.reward_workers, timeout_s=setup.reward_timeout
        )
        self._caller: EngineCaller | None = None
        self._runners: dict[bytes, GroupRunner] = {}
        self._trained = range(1)
        self._groups: dict[int, tuple[RunningGroup | None, asyncio.Task[Finished]]] = {}
        self._failures: dict[int, Exception] = {}
        """Of groups whose samples cannot be sent to the driver: their tasks are being cancelled."""
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._question_numbers = itertools.count()
        self.closed = asyncio.Event()

    # ---------------------------------------------------------------- start and end

    async def open(self) -> None:
        """Opens generators and builds rewards. Raises the first error."""
        with gc_paused():
            self._tokenizer = load_tokenizer(
                Path(self._setup.model_path), trust_remote_code=self._setup.trust_remote_code
            )
        opening = [self._open(spec) for spec in self._setup.generators]
        await asyncio.gather(*opening, *(self._warm(spec) for spec in self._setup.rewards))

    async def _open(self, spec: PluginSpec) -> None:
        generator = self._generators[spec.to_json()] = self._setup.agreement.resolve(spec, self._registry).build()
        with foreign(generator, "open"):
            await generator.open()

    async def _warm(self, spec: PluginSpec) -> None:
        part = self._setup.agreement.resolve(spec, self._registry)
        asks = part.driver.needs_reward_model(part.config)
        if asks:
            self._rewards.engines = DriversEngines(self._ask)
        own = OwnLimit(seconds=partial(part.driver.timeout_s, part.config), follows=part.driver.timeout_follows)
        await self._rewards.warm(spec, own=own, needs_reward_model=asks)

    async def close(self) -> None:
        """Ends all groups, then generators and rewards."""
        tasks = [*(task for _, task in self._groups.values()), *self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for generator in self._generators.values():
            with held():
                await generator.close()
        if self._caller is not None:
            await self._caller.close()
        self._rewards.close()

    # ---------------------------------------------------------------- messages

    def take(self, message: Any) -> None:
        match message:
            case Completed():
                self._requests.take(message)
            case Call():
                call = self._calls[message.number] = asyncio.create_task(self._call(message))
                call.add_done_callback(lambda _: self._calls.pop(message.number))
            case StartGroup():
                self._start(message)
            case StopGroups():
                for running, _ in (self._groups[number] for number in message.numbers if number in self._groups):
                    if running is not None:
                        running.stop.set()
            case CancelGroup():
                if message.number in self._groups:
                    running, task = self._groups[message.number]
                    # A task that is cancelled before its first step would leave the group's running.
                    (task if running is None else running.task).cancel()
            case CancelCall():
                if message.number in self._calls:
                    self._calls[message.number].cancel()
            case Versions():
                self._trained = message.trained
            case Reply():
                self._take_reply(message)
            case Close():
                self.closed.set()

    async def _call(self, message: Call) -> None:
        def fail(error: Exception) -> None:
            self._send(Called(message.number, packed(error)))

        result: Any = None
        with held() as failed:
            if self._caller is None:
                part = self._setup.agreement.resolve(self._setup.engine, self._registry)
                self._caller = part.driver.build_caller(part.config, max_calls=self._setup.max_calls)
            result = await self._caller.call(message.asked)
        if failed.error is not None:
            fail(failed.error)
        else:
            what = f'engine "{self._setup.engine.name}", the response to a call'
            self._send(Called(message.number, result), lambda cause: fail(unsendable_error(what, cause)))

    async def _ask(self, method: str, arguments: Sequence[Any]) -> Any:
        number = next(self._question_numbers)
        reply = self._questions[number] = asyncio.get_running_loop().create_future()

        def fail(cause: Exception) -> None:
            if not reply.done():
                reply.set_exception(unsendable_error(f"a reward, {method} of its engines", cause))

        self._send(Question(number, method, tuple(arguments)), fail)
        try:
            return await reply
        finally:
            del self._questions[number]

    def _take_reply(self, message: Reply) -> None:
        reply = self._questions.get(message.number)
        if reply is None or reply.done():
            return
        if isinstance(message.result, Exception):
            reply.set_exception(raised_here(message.result))
        else:
            reply.set_result(message.result)

    # ---------------------------------------------------------------- groups

    def _runner(self, pickled: bytes) -> GroupRunner:
        if pickled not in self._runners:
            setup: RunnerSetup = pickle.loads(pickled)  # noqa: S301 - of the same run
            assert self._tokenizer is not None
            self._runners[pickled] = GroupRunner(
                setup.settings,
                generator=self._generators[setup.generator],
                client=GroupClient(-1, self._requests),
                tokenizer=self._tokenizer,
                rewards=self._rewards,
                on_failure=lambda failure: None,
                versions=lambda: self._trained,
            )
        return self._runners[pickled]

    def _start(self, message: StartGroup) -> None:
        number, prompt = message.number, message.prompt
        traces: list[GroupTrace] = []
        runner = replace(
            self._runner(message.runner),
            client=GroupClient(number, self._requests),
            on_failure=partial(self._response_failed, number),
            on_trace=traces.append,
        )
        where = f"{name_of(runner.generator)}, the samples of {prompt.origin or f'group {prompt.group_index}'}"
        kept = [] if message.kept is None else message.kept.samples(prompt)
        running = None if message.score_only else runner.start(prompt, kept)
        group = SampleGroup(prompt=prompt, samples=tuple(kept))
        work = self._score(number, runner, group) if running is None else self._run(number, running, traces, where)
        task = asyncio.create_task(work)
        self._groups[number] = running, task
        task.add_done_callback(partial(self._report, number, where))

    def _report(self, number: int, where: str, task: asyncio.Task[Finished]) -> None:
        """Sends what became of a group, always as its last message."""
        del self._groups[number]

        def fail(error: Exception) -> None:
            self._send(Failed(number, packed(error)))

        if task.cancelled():
            failure = self._failures.pop(number, None)
            self._send(Failed(number, failure and packed(failure)))
            return
        with held() as failed:
            finished = task.result()
        if (error := self._failures.pop(number, failed.error)) is not None:
            fail(error)
        else:
            self._send(finished, lambda cause: fail(unsendable_error(where, cause)))

    def _fail(self, number: int, where: str, cause: Exception) -> None:
        """Ends a group that cannot send its samples."""
        self._failures[number] = unsendable_error(where, cause)
        _, task = self._groups[number]
        task.cancel()

    async def _score(self, number: int, runner: GroupRunner, group: SampleGroup) -> Finished:
        scored = await runner.score(group)
        return Finished(number, RewardColumns.of(group.samples, scored.samples), None)

    async def _run(self, number: int, running: RunningGroup, traces: Sequence[GroupTrace], where: str) -> Finished:
        generated = asyncio.create_task(running.all_generated.wait())
        try:
            await asyncio.wait({generated, running.task}, return_when=asyncio.FIRST_COMPLETED)
            if running.generated:
                generated_samples = Generated(number, GroupColumns.of(running.generated, running.prompt))
                self._send(generated_samples, partial(self._fail, number, where))
            group = await running.task
        finally:
            generated.cancel()
            if not running.task.done():
                running.task.cancel()
                await asyncio.wait({running.task})
        return Finished(
            number, RewardColumns.of(running.generated, group.samples), pack_trace(traces[0]) if traces else None
        )

    def _response_failed(self, group: int, failure: SampleFailure) -> None:
        self._send(ResponseFailed(group, failure.index, failure.attempt, failure.will_retry, packed(failure.error)))
