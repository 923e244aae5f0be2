"""What goes wrong on one rank while all of them write: raised on every one, as what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def first_failure_alone() -> Iterator[None]:
    """torch wraps what went wrong (a full disk, say) into a BaseException, which passes every `except Exception`."""
    try:
        yield
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from error


def on_all_ranks(work: Callable[[], None], group: dist.ProcessGroup | None, world_size: int) -> None:
    """Returns when all ranks have done theirs. What one of them could not write is raised on every rank, so that none waits for
    it. A collective, unless there is one rank."""
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
