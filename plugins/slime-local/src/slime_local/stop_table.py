"""StopTable: the stop tokens of the running rows, on their device.

Shapes: N rows · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class StopTable:
    """One line of V booleans for each distinct set of stop tokens. Call under `torch.inference_mode`."""

    def __init__(self, model_stop_ids: frozenset[int], vocab_size: int, device: torch.device) -> None:
        """`model_stop_ids`: they end every sequence."""
        self._model_stop_ids = model_stop_ids
        self._lines: dict[frozenset[int], int] = {}
        self._table = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def clear(self) -> None:
        self._lines.clear()

    def line_of(self, stop_token_ids: Iterable[int]) -> int:
        """The table's row of the model's stop tokens and these; it is added if it does not exist."""
        ids = self._model_stop_ids.union(stop_token_ids)
        known = self._lines.get(ids)
        if known is not None:
            return known
        line = torch.zeros((1, self._table.shape[1]), dtype=torch.bool, device=self._table.device)
        line[0, list(ids)] = True
        self._table = torch.cat([self._table[: len(self._lines)], line])
        return self._lines.setdefault(ids, len(self._lines))

    def stop_tokens(self, lines_N: Tensor) -> Tensor:
        """(N, V) bool."""
        return self._table[lines_N]

    def stops(self, lines_N: Tensor, tokens_N: Tensor) -> Tensor:
        """(N,) bool: whether each token ends its row."""
        return self._table.view(-1)[lines_N * self._table.shape[1] + tokens_N]
