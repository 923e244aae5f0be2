"""RequestsInFlight: the requests that an engine has not responded to yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import xxhash

from slime_core.contracts.engine import CallerLost
from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError, EngineRefused, EngineUnavailable
from slime_core.types.completion import Completion, FinishReason, GenerateRequest
from slime_serving.connection import Connection, ConnectionLost, NoResponse
from slime_serving.requests import AcceptedRequests
from slime_serving.running import RequestIds, Running
from slime_serving.server_group import WATCH_S

ABORT_AGAIN_S: Final = 0.02
"""An abort that overtakes its request has no effect; it is sent again until there is a response, each time after twice the
time."""
LONGEST_S: Final = 1.0
ROUNDS: Final = 2
"""Rounds of aborts by id: a server loses one that arrives before its request. After these rounds all requests are aborted,
and those that should continue are sent again."""
PAUSE_POLL_S: Final = 0.005


class Fleet(Protocol):
    """The servers of one engine, which have equal weights."""

    @property
    def servers(self) -> Sequence[Connection]: ...

    @property
    def routed(self) -> bool:
        """Whether a router in front of the servers chooses one for each request."""

    def at(self, place: int) -> Connection:
        """The connection for requests to this server, or to the router."""

    def headers(self, session: str | None) -> Mapping[str, str] | None:
        """Headers of a request of this conversation."""

    async def abort(self, ids: Sequence[str] | None) -> None:
        """Aborts these requests on all servers, if they are there; None: all requests."""


class RequestsInFlight:
    """Sends requests while it is open. Interrupted requests wait here, and are sent again with their tokens so far."""

    def __init__(
        self,
        fleet: Fleet,
        requests: AcceptedRequests,
        setup: EngineSetup,
        *,
        expected_version: Callable[[], int | None],
        request_timeout_s: float,
        control_timeout_s: float,
    ) -> None:
        """`expected_version`: returns the version that responses must have; None: it may change while a request runs."""
        self._fleet = fleet
        self._requests = requests
        self._setup = setup
        self._name = f"engine {setup.index}"
        self._expected_version = expected_version
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._rids = RequestIds()
        self._running: dict[str, Running] = {}
        self._load: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[Completion]] = set()
        self._failure: EngineError | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._sweeps = 0
        self._sweeps_ended = 0

    def __len__(self) -> int:
        return len(self._running)

    def fail(self, failure: EngineError) -> None:
        """Ends all requests with `failure`, and refuses later ones."""
        self._failure = failure
        # A task that is cancelled before its first step never raises `failure`; call_soon runs after that first step.
        loop = asyncio.get_running_loop()
        for task in self._tasks:
            loop.call_soon(task.cancel)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---------------------------------------------------------------- requests

    def enter(self, requests: Sequence[GenerateRequest]) -> list[asyncio.Task[Completion]]:
        """Starts a task per request; pass them to `leave`. Raises EngineRefused for a request that cannot be served, before
        any runs."""
        if problem := self._requests.problem(requests, self._running):
            raise EngineRefused(f"{self._name}: {problem}")
        runs = [self._requests.begin(request) for request in requests]
        self._running |= {run.request.request_id: run for run in runs}
        tasks = []
        for run in runs:
            task = run.task = asyncio.create_task(self._serve(run))
            # Not in the task itself: it may be cancelled before it begins.
            task.add_done_callback(partial(self._ended, run))
            tasks.append(task)
        self._tasks.update(tasks)
        return tasks

    def _ended(self, run: Running, task: asyncio.Task[Completion]) -> None:
        run.ended.set()
        self._running.pop(run.request.request_id, None)

    async def leave(self, tasks: Sequence[asyncio.Task[Completion]]) -> None:
        """Cancels tasks that still run, because their caller has gone; the closed connection makes the server abort them."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.difference_update(tasks)

    async def _serve(self, run: Running) -> Completion:
        """Returns the whole response, in as many parts as weight updates interrupt it."""
        index = self._setup.index
        try:
            while True:
                room = self._setup.max_context_len - len(run.request.token_ids) - len(run.token_ids)
                if min(room, run.request.sampling.max_new_tokens - len(run.token_ids)) <= 0:
                    return run.completion(FinishReason.LENGTH, index)
                while not self.is_open and not run.aborted:
                    await self._open_or_aborted(run)
                if run.aborted:
                    return run.completion(FinishReason.ABORT, index)
                reason = await self._ask(run, room)
                if reason is not FinishReason.ABORT and not self.is_open and not run.aborted:
                    # It ended just before a pause; between pause and resume nothing is served.
                    await self._open_or_aborted(run)
                # Interrupted by a pause or an abort-all, it continues; aborted from outside, it does not.
                swept = run.sweep != self._sweeps
                if reason is not FinishReason.ABORT or run.aborted or (self.is_open and not swept):
                    return run.completion(reason, index)
                run.interrupt()
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            if run.given_up:
                return run.completion(FinishReason.ABORT, index)
            raise

    async def _open_or_aborted(self, run: Running) -> None:
        waits = [asyncio.ensure_future(self._open.wait()), asyncio.ensure_future(run.ended.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _ask(self, run: Running, room: int) -> FinishReason:
        """Requests one part of the response. If the connection was lost, the part is requested once more on a new one. Of a
        process that has just died, its own error from the watch should come first, so others are raised a moment later."""
        late: tuple[type[EngineError], ...] = (NoResponse,)
        try:
            try:
                return await self._ask_once(run, room)
            except ConnectionLost:
                self._check_alive()
                late = (NoResponse, EngineUnavailable)
                return await self._ask_once(run, room)
        except late:
            await asyncio.sleep(2 * WATCH_S)
            raise

    async def _ask_once(self, run: Running, room: int) -> FinishReason:
        session = run.request.session_id
        place = self._place(session)
        server = self._fleet.at(place)
        expected = self._expected_version()
        run.rid = self._rids.next_for(run.request.request_id)
        run.sweep = self._sweeps_ended
        self._load[place] += 1
        caller, headers, limit = run.request.caller, self._fleet.headers(session), self._request_timeout_s
        try:
            if caller is None:
                reply = await server.post(server.dialect.generate, run.body(room), timeout_s=limit, headers=headers)
            else:
                reply = await caller.call(server.as_call(run.body(room), timeout_s=limit, headers=headers))
        except CallerLost:
            return FinishReason.ABORT
        finally:
            self._load[place] -= 1
        return run.take(reply, expected_version=expected, server=server.name)

    def _place(self, session: str | None) -> int:
        """The server with the fewest requests; a session always has the same server. A router chooses by itself."""
        if self._fleet.routed:
            return 0
        if session is not None:
            return xxhash.xxh3_64_intdigest(session.encode()) % len(self._fleet.servers)
        return min(range(len(self._fleet.servers)), key=lambda place: self._load[place])

    def using(self, adapter: str) -> list[str]:
        """Ids of the requests that name this adapter."""
        return [name for name, run in self._running.items() if run.request.adapter == adapter]

    # ---------------------------------------------------------------- aborts

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Aborts requests; None: all. Unknown ids are ignored, because they may just have ended. Returns when all have
        ended."""
        names = list(self._running) if request_ids is None else [name for name in request_ids if name in self._running]
        for name in names:
            self._running[name].aborted = True
        await self._end({name: self._running[name] for name in names})

    async def _end(self, runs: dict[str, Running]) -> None:
        """Sends aborts to the servers until each of these requests has its response."""
        for run in runs.values():
            if run.aborted and not self.is_open:
                run.ended.set()
        began = asyncio.get_running_loop().time()
        deadline = began + self._control_timeout_s
        patience = ABORT_AGAIN_S
        rounds = 0
        while left := [run for name, run in runs.items() if self._running.get(name) is run]:
            self._check_alive()
            now = asyncio.get_running_loop().time()
            if not self.is_open:
                # A server may keep them as long as it is paused. After the limit they end here; the server aborts them when it
                # continues, since their connections are closed.
                deadline = now + self._control_timeout_s
                if now > began + self._control_timeout_s:
                    for run in left:
                        self._give_up(run)
            if now > deadline:
                raise EngineError(f"{self._name}: {len(left)} aborted requests have not ended in time.")
            ids = [run.rid for run in left if run.rid]
            rounds += 1
            if len(left) == len(self._running) or rounds > ROUNDS:
                await self._sweep()
            else:
                await self._fleet.abort(ids)
            waits = [asyncio.ensure_future(run.ended.wait()) for run in left]
            _, pending = await asyncio.wait(waits, timeout=patience)
            for wait in waits:
                wait.cancel()
            # A server that keeps requests while it is paused ends them after `resume`; those that wait here end at once.
            await asyncio.sleep(0 if pending else patience)
            patience = min(2 * patience, LONGEST_S)

    def _give_up(self, run: Running) -> None:
        """Ends a request without the rest of its response."""
        if run.task is not None and not run.given_up:
            run.given_up = True
            run.task.cancel()

    async def _sweep(self) -> None:
        """Aborts all requests. Those that should not end continue as after a pause, even if they were sent during the call."""
        self._sweeps += 1
        try:
            await self._fleet.abort(None)
        finally:
            self._sweeps_ended += 1

    # ---------------------------------------------------------------- pauses

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def hold(self) -> None:
        """Stops sending requests."""
        self._open.clear()

    async def interrupt(self) -> None:
        """Ends all parts that are on servers; their requests wait here."""
        deadline = asyncio.get_running_loop().time() + self._control_timeout_s
        while any(self._load.values()):
            self._check_alive()
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(
                    f"{self._name}: {sum(self._load.values())} requests have not ended in time for a pause."
                )
            await self._fleet.abort(None)
            for _ in range(20):
                if not any(self._load.values()):
                    break
                await asyncio.sleep(PAUSE_POLL_S)

    def resume(self) -> None:
        """Sends the waiting requests."""
        self._open.set()
