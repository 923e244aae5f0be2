"""Context-parallel ranks as threads: the reductions over a group, without processes and without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from slime_core.contracts.loss import Segments
from slime_core.types.microbatch import MicroBatch
from slime_training.segments import LocalSegments

T = TypeVar("T")
SegmentsOf = Callable[[MicroBatch], Segments]


class Meeting:
    """Where the ranks add up their tensors. The n-th call of one rank meets the n-th call of the others."""

    def __init__(self, num_ranks: int) -> None:
        self._news = threading.Condition()
        self._calls: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        self._ended = [False] * num_ranks

    def total(self, rank: int, part: Tensor) -> Tensor:
        """The sum over ranks, in their order. AssertionError if one of them ends without having called as often."""
        with self._news:
            number = len(self._calls[rank])
            self._calls[rank].append(part)
            self._news.notify_all()
            self._news.wait_for(lambda: self._all_called(number) or self._one_ended(number))
            assert self._all_called(number), (
                "the ranks of a context-parallel group do not reduce equally often: how often a loss calls Segments may "
                "not depend on the data, and a rank without tokens calls too"
            )
            return torch.stack([calls[number] for calls in self._calls]).sum(0)

    def end(self, rank: int) -> None:
        """Marks this rank as ended: no other rank waits for it any longer."""
        with self._news:
            self._ended[rank] = True
            self._news.notify_all()

    def _all_called(self, number: int) -> bool:
        return all(len(calls) > number for calls in self._calls)

    def _one_ended(self, number: int) -> bool:
        return any(ended and len(calls) <= number for calls, ended in zip(self._calls, self._ended, strict=True))


class MetSegments(LocalSegments):
    """Reductions of one rank that goes through a meeting."""

    def __init__(self, micro: MicroBatch, meeting: Meeting, rank: int) -> None:
        super().__init__(micro.segments, micro.num_samples)
        self._meeting = meeting
        self._rank = rank

    def seq_sum(self, values: Tensor) -> Tensor:
        summed: Tensor = _Sum.apply(super().seq_sum(values), self._meeting, self._rank)  # type: ignore[no-untyped-call]
        return summed


class _Sum(torch.autograd.Function):
    """An all-reduce whose gradient is an all-reduce: every rank's loss depends on every rank's tokens."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, meeting: Meeting, rank: int) -> Tensor:
        ctx.meeting, ctx.rank = meeting, rank
        return meeting.total(rank, values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.meeting.total(ctx.rank, grads[0]), None, None


def as_ranks(num_ranks: int, work: Callable[[int, SegmentsOf], T]) -> list[T]:
    """What each rank makes of `work(rank, segments_of)`. The first failure that is not another's is raised."""
    if num_ranks == 1:
        return [work(0, lambda micro: LocalSegments(micro.segments, micro.num_samples))]
    meeting = Meeting(num_ranks)

    def begin(rank: int) -> T:
        try:
            return work(rank, lambda micro: MetSegments(micro, meeting, rank))
        finally:
            meeting.end(rank)

    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(begin, rank) for rank in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, AssertionError)), errors[0])
    return [future.result() for future in futures]
