"""Files of a checkpoint: how long they were when they were written, so that a cut is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from slime_core.errors import CheckpointError


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


def sizes_of(folder: Path, files: Iterable[Path]) -> dict[str, int]:
    """Bytes of each file, by its path in the folder."""
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}


def check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """CheckpointError, naming the file, unless all are there with their sizes."""
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; the checkpoint is incomplete.")
        if (found := file.stat().st_size) != size:
            raise CheckpointError(f"{file}: {found} bytes where {size} were written; the checkpoint is cut short.")
