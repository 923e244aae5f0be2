"""ServerGroup: starts, watches and calls the servers of one engine."""

from __future__ import annotations

import asyncio
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, Final, Generic, TypeVar

import aiohttp

from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_serving.connection import Connection, allow_connections, new_pool
from slime_serving.running import version_of
from slime_serving.server_process import ServerProcess

WATCH_S: Final = 0.25
"""Interval of the checks whether processes live."""

C = TypeVar("C", bound=Connection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Generic[C]):
    """A server, and the ports that are held for it until it responds."""

    connection: C
    process: ServerProcess
    held: Sequence[socket.socket] = ()


class ServerGroup(ABC, Generic[C]):
    """Call `start` once, and `stop` at the end. A subclass starts the servers of its program."""

    version_path: ClassVar[str]
    """Path of the request whose response has `weight_version`."""

    def __init__(self, program: str, *, control_timeout_s: float, health_timeout_s: float) -> None:
        self.name = f"engine {program}"
        self.servers: list[C] = []
        self._processes: list[ServerProcess] = []
        self._begun: dict[int, Started[C]] = {}
        """Servers that wait for `launch`, by place."""
        self._gates: list[Path] = []
        """Folders that these look into."""
        self._pool: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None
        self._control_timeout_s = control_timeout_s
        self._health_timeout_s = health_timeout_s

    @abstractmethod
    def external(self, setup: EngineSetup, pool: aiohttp.ClientSession) -> Sequence[C] | None:
        """Connections to servers that the run did not start; None: it starts its own."""

    @abstractmethod
    async def launch(self, setup: EngineSetup, place: int, pool: aiohttp.ClientSession) -> Started[C]:
        """Starts one server. Raises EngineError if it dies or hangs; nothing of it is left then."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of servers of the engine."""

    def begin(self, setup: EngineSetup, place: int, pool: aiohttp.ClientSession) -> Started[C] | None:
        """Starts a server that waits, before it uses devices, until `launch` is called for this place. None: the program
        cannot."""
        return None

    def new_gate(self) -> Path:
        """A file that a server waits for; it is made by `ServerProcess.open_gate`, and its folder is gone after `stop`."""
        self._gates.append(Path(mkdtemp(prefix="slime-gate-")))
        return self._gates[-1] / "open"

    async def prepare(self, setup: EngineSetup) -> None:
        """Begins the start of the servers; `start` follows, or `stop`."""
        pool = self._pool = self._pool or new_pool()
        if setup.num_nodes > 1 or self.external(setup, pool) is not None:
            return
        for place in range(self.size):
            if (begun := self.begin(setup, place, pool)) is not None:
                self._begun[place] = begun

    async def start(self, setup: EngineSetup) -> None:
        """Starts or connects to the servers. Raises EngineError if one dies or hangs; call `stop` then."""
        self.name = f"engine {setup.index}"
        allow_connections(setup.max_batch, self.name)
        pool = self._pool = self._pool or new_pool()
        external = self.external(setup, pool)
        if external is not None:
            if setup.num_nodes > 1:
                raise EngineError(
                    f"{self.name}: launcher.rollout_num_gpus_per_engine: the run does not know the devices of external "
                    "servers. Omit it."
                )
            self.servers = list(external)
            return
        starting = [asyncio.create_task(self.launch(setup, place, pool)) for place in range(self.size)]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if not isinstance(outcome, BaseException):
                    self.servers.append(outcome.connection)
                    self._processes.append(outcome.process)

    @property
    def pid(self) -> int | None:
        """Pid of the first server; None for external servers."""
        return self._processes[0].pid if self._processes else None

    @property
    def start_seconds(self) -> Mapping[str, float]:
        """Parts of the first server's start; empty for external servers."""
        return self._processes[0].start_seconds if self._processes else {}

    def watch(self, on_death: Callable[[EngineError], None]) -> None:
        """Calls `on_death` when the first process has died."""
        self._watch = asyncio.create_task(self._look(on_death), name=f"{self.name}, watch")

    async def _look(self, on_death: Callable[[EngineError], None]) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for process in self._processes:
                if process.exit_code is not None:
                    on_death(self._end_of(process))
                    return

    def _end_of(self, process: ServerProcess) -> EngineError:
        return EngineError(
            f"{self.name}: its process {process.pid} {process.why}. Last lines of {process.log}:\n{process.last_lines()}"
        )

    async def stop(self) -> None:
        """Stops all processes; before `start` it does nothing. Raises EngineError if processes are left, also the next time."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait([watch])
        processes, self._processes = [*(begun.process for begun in self._begun.values()), *self._processes], []
        for port in (port for begun in self._begun.values() for port in begun.held):
            port.close()
        self._begun = {}
        pool, self._pool = self._pool, None
        try:
            ends = await asyncio.gather(*(process.stop() for process in processes), return_exceptions=True)
        finally:
            # Also if the caller is cancelled.
            for folder in self._gates:
                shutil.rmtree(folder, ignore_errors=True)
            if pool is not None:
                await pool.close()
        # What has not ended is stopped once more by the next call, which else would report that its memory is free.
        self._processes = [
            process for process, end in zip(processes, ends, strict=True) if isinstance(end, BaseException)
        ]
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    # ---------------------------------------------------------------- calls to all servers

    async def ask_health(self, path: str, *others: tuple[C, str]) -> None:
        """GETs `path` from all servers, and `others`. If a process has just died, its error from `watch` should come first,
        so an error of a connection is raised a moment later."""
        asked = [*((server, path) for server in self.servers), *others]
        try:
            await asyncio.gather(*(each.get(where, timeout_s=self._health_timeout_s) for each, where in asked))
        except EngineError:
            await asyncio.sleep(2 * WATCH_S)
            raise

    async def on_each(self, call: Callable[[C], Coroutine[Any, Any, None]]) -> None:
        """Calls it for all servers at once, and waits for every one, also if one fails: then it raises the first error."""
        ends = await asyncio.gather(*map(call, self.servers), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end

    async def post(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """Sends the same call to all servers, and returns the responses by server. Raises EngineError; if a process has ended,
        or its log has the cause, with that."""
        try:
            return list(await asyncio.gather(*(self.post_to(server, path, body) for server in self.servers)))
        except EngineError as error:
            if (reason := await self._reason_of(error)) is None:
                raise
            raise reason from error

    async def _reason_of(self, error: EngineError) -> EngineError | None:
        """None: the processes do not report why a call has failed."""
        if self._processes:
            # A process ends a moment after its connections.
            await asyncio.sleep(2 * WATCH_S)
        for process in self._processes:
            if process.exit_code is not None:
                return self._end_of(process)
            if (cause := process.known_cause) is not None:
                return EngineError(f"{error} {cause}")
        return None

    async def versions(self) -> Sequence[int]:
        """Weight versions by server. Raises EngineError for a version that this run did not send."""
        path = self.version_path
        responses = await asyncio.gather(
            *(server.get(path, timeout_s=self._control_timeout_s) for server in self.servers)
        )
        held = []
        for server, response in zip(self.servers, responses, strict=True):
            try:
                held.append(version_of(response["weight_version"]))
            except (KeyError, TypeError, ValueError) as error:
                raise EngineError(f"{server.name}: {path} has no version that slime sent: {response}") from error
        return held

    @abstractmethod
    async def flush(self) -> None:
        """Drops cached prefixes, which the old weights computed."""

    async def post_to(self, server: C, path: str, body: Mapping[str, Any]) -> Any:
        """`post` for one server. Raises EngineError also if a response reports that the call did not succeed."""
        response = await server.post(path, body, timeout_s=self._control_timeout_s)
        if isinstance(response, Mapping) and response.get("success") is False:
            raise EngineError(f"{server.name}: {path}: {response.get('message') or 'it did not succeed'}")
        return response
