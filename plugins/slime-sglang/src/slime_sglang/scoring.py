"""Log-probs of tokens that are given: a request that writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.errors import EngineError


def score_body(rid: str, tokens: npt.NDArray[np.int32], count: int) -> dict[str, Any]:
    """For /generate: of the last `count` tokens."""
    return {
        "rid": rid,
        "input_ids": np.ascontiguousarray(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # The token there has no log-prob itself.
        "logprob_start_len": len(tokens) - count - 1,
    }


def scored(reply: Any, tokens: npt.NDArray[np.int32], count: int, server: str) -> npt.NDArray[np.float32]:
    """(count,) of the last tokens. EngineError for what cannot be the answer."""
    try:
        entries = reply["meta_info"]["input_token_logprobs"][-count:]
        found = np.array([entry[0] for entry in entries], np.float32)
        said = [int(entry[1]) for entry in entries]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"{server}: the answer to a request for log-probs is none: {type(error).__name__}: {error}; it says "
            f"{str(reply)[:300]}"
        ) from error
    if not are_these(said, tokens[-count:].tolist(), last=int(tokens.max())) or not np.isfinite(found).all():
        raise EngineError(
            f"{server}: was asked for the log-probs of {count} tokens, and answers with those of {said[:8]} ..."
        )
    return np.minimum(found, 0.0)


def are_these(said: Sequence[int], asked: Sequence[int], *, last: int) -> bool:
    """Whether an answer is of the tokens asked for. SGLang says 0 for the last token of its vocabulary, where it clips what
    stands for images, and gives that token's own log-prob; `last`: the only one that it can be."""
    return len(said) == len(asked) and all(
        told == token or (told == 0 and token == last) for told, token in zip(said, asked, strict=True)
    )
