"""The actors: a worker of the kernel in a process that Ray placed.

An actor is created empty and returns its location; then ranks are assigned, and `resolve` creates the worker. Arguments
that are references arrive as what they refer to, arrays as read-only views of the node's shared memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import ray

from slime_core.contracts.engine import EngineInfo
from slime_core.types.completion import Completion, GenerateRequest
from slime_core.workers.engine_worker import EngineWorker, EngineWorkerSpec
from slime_serving.held_port import held_port, place_of
from slime_serving.process_group import group_of

if TYPE_CHECKING:
    from slime_core.workers.train_worker import TrainWorker, TrainWorkerSpec

DEVICES: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedProcess:
    """A process of a machine. After its end another one may get its pid."""

    pid: int
    started: float
    """Seconds since the epoch, as psutil reports them on that machine."""

    @classmethod
    def of(cls, pid: int) -> StartedProcess | None:
        """None if it has ended."""
        try:
            return cls(pid=pid, started=psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None

    def running(self) -> psutil.Process | None:
        """None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            return process if process.create_time() == self.started else None
        except psutil.NoSuchProcess:
            return None

    @property
    def is_another(self) -> bool:
        """Whether its pid belongs to another process now."""
        return self.running() is None and psutil.pid_exists(self.pid)

    def servers(self) -> list[StartedProcess]:
        """Its descendants that lead a process group of their own; [] if it has ended."""
        process = self.running()
        try:
            descendants = [] if process is None else process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        leaders = [StartedProcess.of(child.pid) for child in descendants if group_of(child.pid) == child.pid]
        return [leader for leader in leaders if leader is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where an actor's process is."""

    node: str
    """Ray's id of it."""
    ip: str
    process: StartedProcess
    devices: tuple[str, ...]
    """GPUs that Ray gave it, as CUDA_VISIBLE_DEVICES names them; empty on CPU."""
    log: Path | None
    """Its stderr, a file on that node."""

    @classmethod
    def here(cls) -> Location:
        context = ray.get_runtime_context()
        process = StartedProcess.of(os.getpid())
        assert process is not None
        stderr = Path("/proc/self/fd/2")
        return cls(
            node=context.get_node_id(),
            ip=ray.util.get_node_ip_address(),
            process=process,
            devices=tuple(context.get_accelerator_ids().get("GPU", ())),
            log=stderr.readlink() if stderr.is_symlink() else None,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts by node, then by device."""
        numbers = tuple((0, int(device), "") if device.isdigit() else (1, 0, device) for device in self.devices)
        return (tuple(part.zfill(3) for part in self.ip.split(".")), self.node, numbers)


class TrainActor:
    """One rank. Calls run one after the other, in the process's main thread."""

    def __init__(self) -> None:
        self._worker: TrainWorker | None = None
        self._held: list[socket.socket] = []

    def locate(self) -> Location:
        return Location.here()

    def hold_port(self, host: str) -> str:
        """HOST:PORT that the ranks can meet at, for as long as this process lives. `host`: an address of this machine."""
        self._held.append(held_port(host))
        return place_of(self._held[-1])

    def resolve(self, spec: TrainWorkerSpec, devices: Sequence[str]) -> None:
        """`devices`: of all ranks of the role on this node, by local rank; collectives need to see each other's."""
        # Here, so that an engine's process does not import torch for it.
        from slime_core.workers.train_worker import TrainWorker

        show_devices(devices)
        self._worker = TrainWorker(spec)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """For each item whether it is something, and then, if so, the item: the driver learns from the first, which is
        small, that all is well, and passes the second on without fetching it."""
        for item in getattr(self._worker, method)(*args):
            yield item is not None
            if item is not None:
                yield item


class EngineActor:
    """One engine, in the actor's event loop. Calls overlap."""

    def __init__(self) -> None:
        self._worker: EngineWorker | None = None
        self._held: list[socket.socket] = []

    async def locate(self) -> Location:
        return Location.here()

    async def hold_port(self, host: str) -> str:
        """HOST:PORT that the engine's machines can meet at, for as long as this process lives. `host`: an address of this
        machine."""
        self._held.append(held_port(host))
        return place_of(self._held[-1])

    async def prepare(self, spec: EngineWorkerSpec, devices: Sequence[str]) -> None:
        """`resolve` with the same arguments follows."""
        show_devices(devices)
        self._worker = EngineWorker(spec)
        await self._worker.prepare_start()

    async def resolve(self, spec: EngineWorkerSpec, devices: Sequence[str]) -> tuple[EngineInfo, list[StartedProcess]]:
        """`devices`: all of this engine's, where it shares them with a trainer. Also returns the processes that serve."""
        show_devices(devices)
        self._worker = self._worker or EngineWorker(spec)
        info = await self._worker.start()
        here = StartedProcess.of(os.getpid())
        assert here is not None
        serving = None if info.pid is None else StartedProcess.of(info.pid)
        return info, [*here.servers(), *([] if serving is None else [serving])]

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Completion]]:
        """Completions as they end; those that end together travel together."""
        assert self._worker is not None
        responses = self._worker.generate(requests)
        ended: list[Completion] = []
        following = asyncio.ensure_future(anext(responses, None))
        try:
            while (completion := await following) is not None:
                ended.append(completion)
                following = asyncio.ensure_future(anext(responses, None))
                await asyncio.sleep(0)
                if not following.done():
                    yield ended
                    ended = []
            if ended:
                yield ended
        finally:
            following.cancel()
            await asyncio.wait([following])
            await responses.aclose()

    async def call(self, method: str, *args: Any) -> Any:
        assert self._worker is not None
        return await self._worker.call(method, *args)


def show_devices(devices: Sequence[str]) -> None:
    """CUDA reads this when it is first used, which is later."""
    if devices:
        os.environ[DEVICES] = ",".join(devices)
