"""TeacherClient: log-probs of a batch's responses by the engines of a teacher model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

import numpy as np

from slime_core.errors import EngineError
from slime_core.rollout.served_engines import ServedEngines
from slime_core.types.batch import Batch, Float32

AT_ONCE: Final = 64
"""Sequences per message."""
MESSAGES: Final = 2
"""For each engine, so that it has the next one before the last is done. The time limit of a call counts for each: with all at
once the last ones would wait for the others until it is over."""


@dataclass(eq=False, repr=False)
class TeacherClient:
    """Sends samples to the engines by round robin, `MESSAGES` at a time to each. With a watcher, a message that is lost with
    its engine is sent to another one, `max_losses` times. `name`: row of the engines table."""

    name: str
    engines: ServedEngines
    _: KW_ONLY
    max_losses: int

    async def log_probs(self, batch: Batch) -> Float32:
        """(M,) over response tokens, at temperature 1. EngineError if an engine fails or returns other counts."""
        column = np.empty(len(batch.mask), np.float32)
        limit = asyncio.Semaphore(MESSAGES * max(1, self.engines.client.num_engines))
        work = []
        for number, start in enumerate(range(0, batch.num_samples, AT_ONCE)):
            samples = np.arange(start, min(start + AT_ONCE, batch.num_samples))
            work.append(self._score(number, batch, samples, column, limit))
        await asyncio.gather(*work)
        return column

    async def _score(self, number: int, batch: Batch, samples: Any, column: Float32, limit: asyncio.Semaphore) -> None:
        starts, lengths = batch.token_offsets, batch.response_length
        sequences = [batch.tokens[starts[sample] : starts[sample + 1]] for sample in samples]
        counts = [int(lengths[sample]) for sample in samples]
        async with limit:
            responses = await self._ask(number, sequences, counts)
        if [len(response) for response in responses] != counts:
            raise EngineError(
                f"engines.{self.name}: an engine got a request for {counts[:8]} ... log-probs and returned other counts."
            )
        column[batch.response_rows(samples)] = np.concatenate(responses)

    async def _ask(self, number: int, sequences: Sequence[Any], counts: Sequence[int]) -> Sequence[Any]:
        client = self.engines.client
        for _ in range(self.max_losses + 1):
            await client.serving()
            index = client.indices[number % len(client.indices)]
            if responded := await client.ask_one(index, "score", sequences, counts):
                responses: Sequence[Any] = responded[0]
                return responses
        raise EngineError(
            f"engines.{self.name}: {len(sequences)} sequences were lost {self.max_losses + 1} times with the engine that "
            f"had them (--max-retries {self.max_losses})."
        )
