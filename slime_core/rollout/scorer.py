"""EngineScorer: log-probs of a batch's answers, by engines that hold a model of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from slime_core.errors import EngineError
from slime_core.rollout.seat import EngineHandle
from slime_core.types.batch import Batch, Float32

AT_ONCE: Final = 64
"""Sequences of a message: an engine has the next one before the last is done."""


class EngineScorer:
    """Samples are dealt to the engines in turn, a message at a time."""

    def __init__(self, name: str, engines: Sequence[EngineHandle]) -> None:
        """`name`: of the row in the engines table."""
        self._name = name
        self._engines = tuple(engines)

    async def log_probs(self, batch: Batch) -> Float32:
        """(M,) over the batch's response tokens, at temperature 1. EngineError if an engine fails or answers amiss."""
        column = np.empty(len(batch.mask), np.float32)
        work = []
        for number, start in enumerate(range(0, batch.num_samples, AT_ONCE)):
            samples = np.arange(start, min(start + AT_ONCE, batch.num_samples))
            work.append(self._score(self._engines[number % len(self._engines)], batch, samples, column))
        await asyncio.gather(*work)
        return column

    async def _score(self, engine: EngineHandle, batch: Batch, samples: Any, column: Float32) -> None:
        starts, lengths = batch.token_offsets, batch.response_length
        sequences = [batch.tokens[starts[sample] : starts[sample + 1]] for sample in samples]
        counts = [int(lengths[sample]) for sample in samples]
        answers = await engine.call("score", sequences, counts)
        if [len(answer) for answer in answers] != counts:
            raise EngineError(
                f"engines.{self._name}: an engine was asked for {counts[:8]} ... log-probs and gave others."
            )
        column[batch.response_rows(samples)] = np.concatenate(answers)
