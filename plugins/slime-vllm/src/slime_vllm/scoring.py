"""VllmScorer: log-probs of given tokens, by requests that generate one token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.errors import EngineError
from slime_serving.running import RequestIds
from slime_vllm.connection import VllmConnection
from slime_vllm.server_group import VllmServers


class VllmScorer:
    """Sends requests to the servers of a group round robin."""

    def __init__(self, fleet: VllmServers, *, timeout_s: float) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._rids = RequestIds()

    async def score(
        self, sequences: Sequence[npt.NDArray[np.int32]], num_tokens: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns log-probs (count,) of the last `count` tokens of each sequence. Sends one request per sequence, all at
        once."""
        servers = self._fleet.servers
        asked = [
            self._score(servers[place % len(servers)], tokens, count)
            for place, (tokens, count) in enumerate(zip(sequences, num_tokens, strict=True))
        ]
        return list(await asyncio.gather(*asked))

    async def _score(
        self, server: VllmConnection, tokens: npt.NDArray[np.int32], count: int
    ) -> npt.NDArray[np.float32]:
        if not count:
            return np.empty(0, np.float32)
        body: dict[str, Any] = {
            "request_id": self._rids.next_for("score"),
            "token_ids": np.ascontiguousarray(tokens),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
            "stream": False,
        }
        reply = await server.post(server.dialect.generate, body, timeout_s=self._timeout_s)
        return scored(reply, tokens, count, server.name)


def scored(reply: Any, tokens: npt.NDArray[np.int32], count: int, server: str) -> npt.NDArray[np.float32]:
    """Returns the log-probs (count,) of the last tokens. Raises EngineError if `reply` is no valid response."""
    try:
        entries = reply["prompt_logprobs"][-count:]
        required = tokens[-count:].tolist()
        found = np.array(
            [entry[str(token)]["logprob"] for entry, token in zip(entries, required, strict=True)], np.float32
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"{server}: the response to a request for log-probs is invalid: {type(error).__name__}: {error}. It is "
            f"{str(reply)[:300]}"
        ) from error
    if not np.isfinite(found).all():
        raise EngineError(f"{server}: log-probs of {count} tokens were requested, and some are not finite.")
    return np.minimum(found, 0.0)
