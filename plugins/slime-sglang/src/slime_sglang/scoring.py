"""Scorer: log-probs of given tokens, by requests that generate nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.errors import EngineError
from slime_serving.connection import ConnectionLost
from slime_serving.running import RequestIds
from slime_sglang.connection import SglangConnection
from slime_sglang.server_group import SglangServers
from slime_training.adapters.engine import PromptLogProbs


class Scorer:
    """Sends requests to the servers of a group round robin. `require_alive`: raises once the engine has failed."""

    def __init__(self, fleet: SglangServers, *, timeout_s: float, require_alive: Callable[[], object]) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._require_alive = require_alive
        self._rids = RequestIds()
        self._asked = 0

    async def score(
        self, sequences: Sequence[npt.NDArray[np.int32]], num_tokens: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns log-probs (count,) of the last `count` tokens of each sequence. Sends one request per sequence, all at
        once."""
        asked = [
            self._score(place % len(self._fleet.servers), tokens, count)
            for place, (tokens, count) in enumerate(zip(sequences, num_tokens, strict=True))
        ]
        return list(await asyncio.gather(*asked))

    async def prompt(self, tokens: npt.NDArray[np.int32], top_k: int, adapter: str | None) -> PromptLogProbs:
        """See `AdapterEngine.prompt_log_probs`; tokens: two or more."""
        self._asked += 1
        server = self._fleet.at(self._asked % len(self._fleet.servers))
        count = len(tokens) - 1
        body = score_body(self._rids.next_for("score"), tokens, count) | {"top_logprobs_num": top_k}
        if adapter is not None:
            body["lora_path"] = adapter
        reply = await server.post("/generate", body, timeout_s=self._timeout_s)
        log_probs = scored(reply, tokens, count, server.name)
        ids, values = likeliest(reply, count, top_k, server.name)
        return PromptLogProbs(log_probs=log_probs, top_ids=ids, top_log_probs=values)

    async def _score(self, place: int, tokens: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.float32]:
        if not count:
            return np.empty(0, np.float32)
        try:
            return await self._score_once(self._fleet.at(place), tokens, count)
        except ConnectionLost:
            self._require_alive()
            return await self._score_once(self._fleet.at(place), tokens, count)

    async def _score_once(
        self, server: SglangConnection, tokens: npt.NDArray[np.int32], count: int
    ) -> npt.NDArray[np.float32]:
        rid = self._rids.next_for("score")
        reply = await server.post("/generate", score_body(rid, tokens, count), timeout_s=self._timeout_s)
        return scored(reply, tokens, count, server.name)


def score_body(rid: str, tokens: npt.NDArray[np.int32], count: int) -> dict[str, Any]:
    """The body for /generate that requests log-probs of the last `count` tokens."""
    return {
        "rid": rid,
        "input_ids": np.ascontiguousarray(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # The token there has no log-prob itself.
        "logprob_start_len": len(tokens) - count - 1,
    }


def scored(reply: Any, tokens: npt.NDArray[np.int32], count: int, server: str) -> npt.NDArray[np.float32]:
    """Returns the log-probs (count,) of the last tokens. Raises EngineError if `reply` is no valid response."""
    try:
        entries = reply["meta_info"]["input_token_logprobs"][-count:]
        found = np.array([entry[0] for entry in entries], np.float32)
        returned = [int(entry[1]) for entry in entries]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"{server}: the response to a request for log-probs is invalid: {type(error).__name__}: {error}. It is "
            f"{str(reply)[:300]}"
        ) from error
    if not are_these(returned, tokens[-count:].tolist(), last=int(tokens.max())) or not np.isfinite(found).all():
        raise EngineError(
            f"{server}: log-probs of {count} tokens were requested, but the response has other tokens: {returned[:8]} ..."
        )
    return np.minimum(found, 0.0)


def are_these(returned: Sequence[int], asked: Sequence[int], *, last: int) -> bool:
    """Whether the tokens of a response are the requested ones. SGLang returns 0 for the last token of its vocabulary, to
    which it clips image tokens, with that token's own log-prob. `last`: the only token for which 0 is accepted."""
    return len(returned) == len(asked) and all(
        found == token or (found == 0 and token == last) for found, token in zip(returned, asked, strict=True)
    )


def likeliest(reply: Any, count: int, top_k: int, server: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Ids and log-probs (count, top_k) of the likeliest tokens. Raises EngineError if `reply` is no valid response."""
    if not top_k:
        return np.empty((count, 0), np.int32), np.empty((count, 0), np.float32)
    try:
        rows = reply["meta_info"]["input_top_logprobs"][-count:]
        ids = np.array([[entry[1] for entry in row] for row in rows], np.int32)
        values = np.array([[entry[0] for entry in row] for row in rows], np.float32)
        if ids.shape != (count, top_k) or not np.isfinite(values).all():
            raise ValueError(f"shape {ids.shape} instead of {(count, top_k)}")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"{server}: the response to a request for likeliest tokens is invalid: {type(error).__name__}: {error}."
        ) from error
    return ids, np.minimum(values, 0.0)
