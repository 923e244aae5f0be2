"""Kills the processes of a lost actor, on whichever machine of the cluster they run, and waits for their end."""

from __future__ import annotations

import asyncio
import contextlib
import time
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


def end_here(actor: StartedProcess, serving: StartedProcess | None, limit_s: float) -> list[int]:
    """Kills the actor's process, which may hang, and the process group of its server. Returns the pids on this machine that
    still run after `limit_s` seconds; [] if all have ended."""
    deadline = time.monotonic() + limit_s
    process = actor.running()
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    left = []
    if serving is not None and serving.pid != actor.pid and not serving.is_another:
        left = [other.pid for other in kill_process_group(serving.pid, limit_s)]
    while process is not None and not has_ended(process):
        if time.monotonic() > deadline:
            return [process.pid, *left]
        time.sleep(POLL_S)
    return left


async def end_on(location: Location, serving: StartedProcess | None, *, here: bool) -> list[int]:
    """`end_here` on the machine of `location`. [] also for a machine that Ray has lost: it cannot be asked, and the run uses
    it no longer. TimeoutError if it does not respond."""
    if here:
        return await asyncio.to_thread(end_here, location.process, serving, END_S)
    if not any(node["NodeID"] == location.node and node["Alive"] for node in ray.nodes()):
        return []
    there: Any = ray.remote(end_here).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(location.node, soft=False), max_retries=0
    )
    try:
        async with asyncio.timeout(END_S + WORKER_S):
            left: list[int] = await there.remote(location.process, serving, END_S)
            return left
    except RayError:
        # It was lost meanwhile.
        if any(node["NodeID"] == location.node and node["Alive"] for node in ray.nodes()):
            raise
        return []
