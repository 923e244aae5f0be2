"""MicroBatchMemory: what a rank does with a micro-batch that does not fit into the memory of its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from slime_core.algorithm.micro_batches import halves
from slime_core.contracts.backend import OutOfDeviceMemory
from slime_core.errors import TrainingError
from slime_core.types.batch import Int32, Int64
from slime_core.types.microbatch import MicroBatch

T = TypeVar("T")


class Work(NamedTuple):
    name: str
    flag: str
    """Limits the tokens of its micro-batches."""


TRAINING: Final = Work("an optimizer step", "--max-tokens-per-gpu")
SCORING: Final = Work("a forward for log-probs or values", "--log-probs-max-tokens-per-gpu")


class MicroBatchMemory:
    """A rank that is alone splits the micro-batch and repeats the call: the sums over micro-batches are the same, up to
    rounding. Of several ranks each would wait for the others' micro-batches: the run ends with the one that is too large."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._splits = 0

    def take_splits(self) -> int:
        """Number of splits since the last call."""
        splits, self._splits = self._splits, 0
        return splits

    def fit(
        self,
        call: Callable[[Sequence[MicroBatch]], T],
        pack: Callable[[Sequence[Int64]], Sequence[MicroBatch]],
        micros: Sequence[Int64],
        lengths: Int32,
        work: Work,
        *,
        may_repeat: bool = True,
    ) -> tuple[T, Sequence[Int64]]:
        """Returns the result, and the micro-batches that it belongs to. `lengths`: tokens of each sample. `may_repeat`: if not,
        the call depends on earlier ones, whose gradients are dropped with it. Raises TrainingError."""
        while True:
            try:
                return call(pack(micros)), micros
            except OutOfDeviceMemory as error:
                number, samples = error.number, micros[error.number]
                if not (self._alone and may_repeat) or len(samples) < 2:
                    raise TrainingError(self._message(error, micros, lengths, work)) from error
            # Outside of `except`: the error holds what the call had in memory.
            micros = [*micros[:number], *halves(samples, lengths.astype(np.int64)), *micros[number + 1 :]]
            self._splits += 1

    def _message(self, error: OutOfDeviceMemory, micros: Sequence[Int64], lengths: Int32, work: Work) -> str:
        samples = micros[error.number]
        tokens = int(lengths[samples].sum())
        what = f"micro-batch {error.number + 1} of {len(micros)} of {work.name}: {tokens} tokens in {len(samples)} sample(s)"
        if len(samples) < 2:
            fix = "One sample cannot be split: lower --rollout-max-response-len, or spread it over more GPUs"
        else:
            fix = f"Pass {work.flag} {max(1, tokens // 2)}"
        return (
            f"out of memory in {what}. {fix}, or let the backend recompute or offload more. The last checkpoint is "
            f"unchanged. The allocator: {error}"
        )
