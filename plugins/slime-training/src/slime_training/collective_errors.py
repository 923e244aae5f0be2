"""An error on one rank while all of them write is raised on every rank, with its own type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def first_failure_alone() -> Iterator[None]:
    """Raises the first rank's error itself: torch wraps it (for example a full disk) into a BaseException, which passes every
    `except Exception`."""
    try:
        yield
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from error


def raise_on_all_ranks(work: Callable[[], None], group: dist.ProcessGroup | None, world_size: int) -> None:
    """Calls `work` and returns when it has finished on all ranks. An error of one rank is raised on every rank, so that none
    waits forever. A collective, unless there is one rank."""
    problem: Exception | None = None
    try:
        work()
    except (OSError, SafetensorError) as error:
        problem = error
    problems: list[Exception | None] = [problem]
    if world_size > 1:
        problems = [None] * world_size
        dist.all_gather_object(problems, problem, group=group)
    if (first := problem or next(filter(None, problems), None)) is not None:
        raise first
