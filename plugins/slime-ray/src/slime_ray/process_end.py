"""Kills the processes of a lost actor, on whichever machine of the cluster they run, and waits for their end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime_ray.actors import Location, StartedProcess
from slime_serving.process_group import has_ended, kill_process_group

POLL_S: Final = 0.02
END_S: Final = 30.0
"""Time limit for killed processes: a driver may take seconds to free the memory of a device."""
WORKER_S: Final = 60.0
"""Time limit beyond that for an end on another machine, where Ray starts a process for it."""


def end_here(actor: StartedProcess, servers: Sequence[StartedProcess], limit_s: float) -> list[StartedProcess]:
    """Kills the actor's process, which may hang, and the process groups of its servers: of those known (`servers`), and of
    those that it has started by now. Returns the processes on this machine that still run after `limit_s` seconds, to be passed
    as `servers` to another attempt; [] if all have ended."""
    deadline = time.monotonic() + limit_s
    if (process := actor.running()) is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            # A process that is stopped starts no others.
            process.suspend()
            servers = [*servers, *actor.servers()]
            process.kill()
    others = {server for server in servers if server.pid != actor.pid and not server.is_another}
    left = {process for each in (actor, *others) if (process := each.running()) is not None}
    # All at once: the first may take all the time.
    with ThreadPoolExecutor(max(len(others), 1)) as pool:
        for group in pool.map(lambda server: kill_process_group(server.pid, limit_s), others):
            left |= set(group)
    while left := {process for process in left if not has_ended(process)}:
        if time.monotonic() > deadline:
            break
        for process in left:
            # One that another attempt left may lead no group.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)
    found = [StartedProcess.of(process.pid) for process in sorted(left, key=lambda process: process.pid)]
    return [process for process in found if process is not None]


async def end_on(location: Location, servers: Sequence[StartedProcess], *, here: bool) -> list[StartedProcess]:
    """`end_here` on the machine of `location`. [] also for a machine that Ray has lost: it cannot be asked, and the run uses
    it no longer. TimeoutError if it does not respond."""
    if here:
        return await asyncio.to_thread(end_here, location.process, servers, END_S)
    if not any(node["NodeID"] == location.node and node["Alive"] for node in ray.nodes()):
        return []
    there: Any = ray.remote(end_here).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(location.node, soft=False), max_retries=0
    )
    try:
        async with asyncio.timeout(END_S + WORKER_S):
            left: list[StartedProcess] = await there.remote(location.process, servers, END_S)
            return left
    except RayError:
        # It was lost meanwhile.
        if any(node["NodeID"] == location.node and node["Alive"] for node in ray.nodes()):
            raise
        return []
