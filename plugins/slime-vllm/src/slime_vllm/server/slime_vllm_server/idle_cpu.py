"""Processes of a server on a CPU wait without using it. vLLM's queues spin for a second until the next message comes, on the
cores that compute: on two cores, other processes did not run for seconds while a server generated."""

from __future__ import annotations

import time
from typing import Final

from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

REST_S: Final = 5e-5


def rest_between_looks() -> None:
    """In this process, from now on. On GPUs, where a host has cores to spare and microseconds count, nothing changes."""
    if current_platform.is_cpu():
        shm_broadcast.sched_yield = lambda: time.sleep(REST_S)
