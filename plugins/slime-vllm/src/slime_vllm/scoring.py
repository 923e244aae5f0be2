"""VllmScorer: log-probs of given tokens, by requests that generate one token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.errors import EngineError
from slime_serving.running import RequestIds
from slime_training.adapters.engine import PromptLogProbs
from slime_vllm.connection import VllmConnection
from slime_vllm.server_group import VllmServers


class VllmScorer:
    """Sends requests to the servers of a group round robin."""

    def __init__(self, fleet: VllmServers, *, timeout_s: float) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._rids = RequestIds()
        self._asked = 0

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
        return scored(await self._ask(server, tokens, 0, None), tokens, count, server.name)

    async def prompt(self, tokens: npt.NDArray[np.int32], top_k: int, adapter: str | None) -> PromptLogProbs:
        """See `AdapterEngine.prompt_log_probs`; tokens: two or more."""
        self._asked += 1
        server = self._fleet.servers[self._asked % len(self._fleet.servers)]
        reply = await self._ask(server, tokens, top_k, adapter)
        log_probs = scored(reply, tokens, len(tokens) - 1, server.name)
        top = [likeliest(entry, top_k) for entry in reply["prompt_logprobs"][1:]]
        shape = (len(tokens) - 1, top_k)
        return PromptLogProbs(
            log_probs=log_probs,
            top_ids=np.array([[token for token, _ in row] for row in top], np.int32).reshape(shape),
            top_log_probs=np.array([[value for _, value in row] for row in top], np.float32).reshape(shape),
        )

    async def _ask(self, server: VllmConnection, tokens: npt.NDArray[np.int32], top_k: int, adapter: str | None) -> Any:
        body: dict[str, Any] = {
            "request_id": self._rids.next_for("score"),
            "token_ids": np.ascontiguousarray(tokens),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k, "detokenize": False},
            "stream": False,
        }
        if adapter is not None:
            body["model"] = adapter
        return await server.post(server.dialect.generate, body, timeout_s=self._timeout_s)


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


def likeliest(entry: Mapping[str, Any], top_k: int) -> list[tuple[int, float]]:
    """Token ids and log-probs, the likeliest first. entry: the likeliest and the prompt's own token."""
    rows = sorted(((float(row["logprob"]), -int(token)) for token, row in entry.items()), reverse=True)
    return [(-token, min(value, 0.0)) for value, token in rows[:top_k]]
