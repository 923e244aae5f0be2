"""Link: one worker as the driver sees it: its groups, the requests that it makes, and the calls that engines make through it.

If its process dies or hangs, another one takes its place. What the old one had is aborted, and its groups begin again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from slime_core.errors import RolloutError
from slime_core.registry.boundary import held
from slime_core.rollout.groups import SampleFailure
from slime_core.rollout.served_engines import ServedEngines
from slime_rollout_workers.channel import Unsendable
from slime_rollout_workers.driver_group import DriverGroup
from slime_rollout_workers.messages import (
    AbortRequests,
    Called,
    CancelGroup,
    CancelRequest,
    Failed,
    Finished,
    Generated,
    Question,
    Ready,
    Reply,
    Request,
    ResponseFailed,
    StopGroups,
    Versions,
    WorkerSetup,
)
from slime_rollout_workers.travelling_error import packed, raised_here
from slime_rollout_workers.unsendable import unsendable_error
from slime_rollout_workers.worker_process import WorkerProcess
from slime_rollout_workers.worker_requests import WorkerRequests


class Link:
    """`start`, then any number of `begin`, `cancel`, `stop_groups`, and `stop`."""

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        max_losses: int,
        faults: Counter[str],
        on_blocked: Callable[[float, str], None],
    ) -> None:
        """`max_losses`: how often a group may be lost with its worker. `faults`: counters of a step. `on_blocked`: see
        `HangWatch`."""
        self._setup = setup
        self._name = setup.name
        self._on_blocked = on_blocked
        self._max_losses = max_losses
        self._faults = faults
        self._requests = WorkerRequests(self._name, self._send)
        self._process: WorkerProcess | None = None
        self._ready: asyncio.Future[Exception | None] | None = None
        self._is_ready = False
        self._failure: Exception | None = None
        """Why there is no process any more."""
        self._watch: asyncio.Task[None] | None = None
        self._groups: dict[int, DriverGroup] = {}
        """In the order in which they began."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._versions: Callable[[], range] | None = None
        self._sent_versions: range | None = None
        self._served: Callable[[], Awaitable[ServedEngines | None]] | None = None
        self._takers: dict[type, Callable[[Any], None]] = {
            Called: self._requests.take_call,
            Request: lambda message: self._requests.take(message, self._groups.get(message.group)),
            Generated: self._take_generated,
            Finished: self._take_end,
            Failed: self._take_end,
            CancelRequest: self._requests.take_cancellation,
            AbortRequests: lambda message: self._begin(self._requests.take_abort(message)),
            ResponseFailed: self._report,
            Question: lambda message: self._begin(self._reply(message)),
            Ready: self._take_ready,
        }

    # ---------------------------------------------------------------- start and end

    async def start(self, served: Callable[[], Awaitable[ServedEngines | None]]) -> None:
        """Raises the error that the worker met; RolloutError if it died."""
        self._served = served
        await self._start_process()
        self._watch = asyncio.create_task(self._keep_alive())

    async def _start_process(self) -> None:
        ready = self._ready = asyncio.get_running_loop().create_future()
        process = self._process = await WorkerProcess.start(self._setup, self._take, self._on_blocked)
        # Until here the one before may have got some.
        self._sent_versions = None
        process.reading.add_done_callback(lambda _: ready.cancel())
        await asyncio.wait({ready})
        if ready.cancelled():
            end = await process.end()
            raise process.error or RolloutError(f"{self._name} {end} while it started.")
        if (error := ready.result()) is not None:
            raise raised_here(error)
        self._is_ready = True
        process.watch.begin()
        self._requests.begin()
        for group in self._groups.values():
            self._send_group(group)

    async def stop(self) -> None:
        self._cancel_tasks()
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None:
            await self._process.stop()
        self._give_up(RolloutError(f"{self._name} was stopped."))

    async def _keep_alive(self) -> None:
        with held() as failed:
            await self._replace_lost()
        # No one awaits this task.
        if failed.error is not None:
            self._give_up(failed.error)

    async def _replace_lost(self) -> None:
        """Starts another process whenever this one has died or was killed because it hung. Raises an error if that fails, or
        if the driver fails at a message."""
        while True:
            process = self._process
            assert process is not None
            await asyncio.wait({process.reading})
            self._is_ready = False
            if (error := process.error) is not None:
                # The worker is not the cause: the next one would be lost in the same way.
                await self._requests.lose()
                await process.stop()
                raise error
            pid, end = process.pid, await process.end()
            await self._requests.lose()
            # The next one numbers its questions anew.
            self._cancel_tasks()
            self._faults["rollout/rollout_worker_restarts"] += 1
            self._count_losses(RolloutError(f"{self._name} (pid {pid}) {end}."))
            await self._start_process()

    def _give_up(self, error: Exception) -> None:
        """Fails the groups that it has, and later ones."""
        self._failure = error
        for group in list(self._groups.values()):
            self._drop(group, error)

    def _count_losses(self, error: RolloutError) -> None:
        for group in list(self._groups.values()):
            if group.result.done():
                # It was cancelled.
                self._drop(group, error)
                continue
            group.losses += 1
            will_retry = group.losses <= self._max_losses
            prompt, settings = group.running.prompt, group.runner.settings
            first = prompt.group_index * settings.num_samples
            with held() as failed:
                group.runner.on_failure(SampleFailure(prompt, first, group.losses, will_retry, error))
            if failed.error is not None:
                self._drop(group, failed.error)
            elif not will_retry:
                where = prompt.origin or f"group {prompt.group_index}"
                lost = RolloutError(
                    f"{where}: lost {group.losses} times with the rollout worker that had it (--max-retries "
                    f"{self._max_losses}): its generator or its rewards may end or block the process. The last time: {error}"
                )
                self._drop(group, lost)

    def _drop(self, group: DriverGroup, error: Exception) -> None:
        del self._groups[group.number]
        group.fail(error)

    # ---------------------------------------------------------------- groups

    def begin(self, group: DriverGroup) -> None:
        if self._failure is not None:
            group.fail(self._failure)
            return
        self._versions = group.runner.versions
        self._groups[group.number] = group
        if self._is_ready:
            self._send_group(group)

    def _send_group(self, group: DriverGroup) -> None:
        prompt = group.running.prompt

        def fail(cause: Exception) -> None:
            if self._groups.get(group.number) is group:
                self._drop(group, unsendable_error(prompt.origin or f"group {prompt.group_index}", cause))

        self._send(group.message(), fail)
        if group.running.stop.is_set():
            self._send(StopGroups((group.number,)))

    async def cancel(self, group: DriverGroup) -> None:
        """Returns when the worker has cleaned up."""
        if group.number in self._groups:
            if self._is_ready:
                self._send(CancelGroup(group.number))
            else:
                self._drop(group, RolloutError(f"{self._name} has died"))
        await group.ended.wait()

    async def stop_groups(self, groups: list[DriverGroup]) -> None:
        """Their responses end as they are."""
        chosen = {group.number for group in groups}
        self._send(StopGroups(tuple(chosen)))
        await self._requests.abort_groups(chosen)

    def _send(self, message: Any, unsendable: Unsendable | None = None, /) -> None:
        if self._process is None:
            return
        if self._versions is not None and (trained := self._versions()) != self._sent_versions:
            self._sent_versions = trained
            self._process.send(Versions(trained))
        self._process.send(message, unsendable)

    # ---------------------------------------------------------------- messages

    def _take(self, message: Any) -> None:
        self._takers[type(message)](message)

    def _take_generated(self, message: Generated) -> None:
        if (group := self._groups.get(message.number)) is not None:
            group.take_generated(message)

    def _take_end(self, message: Finished | Failed) -> None:
        if (group := self._groups.pop(message.number, None)) is not None:
            group.take_end(message)

    def _take_ready(self, message: Ready) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_result(message.error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _report(self, failed: ResponseFailed) -> None:
        group = self._groups.get(failed.group)
        if group is None:
            return
        failure = SampleFailure(
            group.running.prompt, failed.sample_index, failed.attempt, failed.will_retry, raised_here(failed.error)
        )
        with held() as raised:
            group.runner.on_failure(failure)
        if raised.error is not None:
            # An observer's error ends the run, as it does where the group is run by the driver.
            group.fail(raised.error)

    async def _reply(self, question: Question) -> None:
        result: Any = None
        with held() as failed:
            assert self._served is not None
            served = await self._served()
            result = await getattr(served, question.method)(*question.arguments)

        def fail(error: Exception) -> None:
            self._send(Reply(question.number, packed(error)))

        if failed.error is not None:
            fail(failed.error)
        else:
            what = f"{question.method} of the engines that rewards ask"
            self._send(Reply(question.number, result), lambda cause: fail(unsendable_error(what, cause)))
