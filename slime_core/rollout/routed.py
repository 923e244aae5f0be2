"""RoutedSequences: expert ids of the sequences of one response, so that engines report only those of new tokens.

A token's experts depend only on the tokens before it, so two sequences share the ids of their common prefix. The choices of
an older policy for its tokens are kept.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from slime_core.errors import EngineError
from slime_core.types.completion import Completion, GenerateRequest
from slime_core.types.routed_experts import RoutedExperts
from slime_core.types.sample import Sample

Tokens = npt.NDArray[np.int32]


class RoutedSequences:
    def __init__(self, kept: Sample | None = None) -> None:
        self._sequences: list[tuple[Tokens, RoutedExperts]] = []
        if kept is not None and kept.routed_experts is not None:
            self._sequences.append((kept.tokens, kept.routed_experts))

    def known(self, token_ids: Tokens) -> int:
        """Length of the longest prefix of `token_ids` whose ids are known."""
        return max((shared(ids, tokens, token_ids) for tokens, ids in self._sequences), default=0)

    def joined(self, request: GenerateRequest, completion: Completion) -> Completion:
        """The completion with ids of all tokens of the sequence but the last. EngineError if requested ids are missing."""
        if not len(completion.token_ids):
            return replace(completion, routed_experts=None)
        start = request.routed_experts_from or 0
        tokens = np.concatenate([request.token_ids, completion.token_ids])
        new = completion.routed_experts
        if new is None or len(new) != len(tokens) - 1 - start:
            raise EngineError(
                f"request {request.request_id}: engine {completion.engine_index} was asked for the expert ids of "
                f"{len(tokens) - 1 - start} tokens and gave {'none' if new is None else len(new)}."
            )
        whole = new
        if start:
            before = max(self._sequences, key=lambda one: shared(one[1], one[0], request.token_ids))[1]
            if before.shape[1:] != new.shape[1:]:
                raise EngineError(
                    f"request {request.request_id}: expert ids of (layers, experts a token) {new.shape[1:]}, and of the tokens "
                    f"before {before.shape[1:]}: engine {completion.engine_index} serves another model."
                )
            whole = np.concatenate([before[:start], new])
        # Sequences that are a prefix of this one need not be kept.
        self._sequences = [
            (held, ids) for held, ids in self._sequences if not np.array_equal(held, tokens[: len(held)])
        ]
        self._sequences.append((tokens, whole))
        return replace(completion, routed_experts=whole)


def shared(ids: RoutedExperts, held: Tokens, token_ids: Tokens) -> int:
    """Length of the common prefix of both sequences that has ids."""
    length = min(len(ids), len(token_ids))
    apart = np.flatnonzero(held[:length] != token_ids[:length])
    return int(apart[0]) if len(apart) else length
