"""The running sequences as tensors: one row each, all ending in one common column.

Every row holds its prompt and response in consecutive columns, and the last token of all rows is in the same
column. So a decode step appends one column to everything, the padding in front of shorter rows is one additive mask,
and the window of columns in sight is as wide as the longest running sequence. Rows are dense: a finished row's place
is taken by the last one.

Columns are counted from the engine's start and never renumbered; `origin` is the one that storage begins with.
Shapes: N rows · C columns of storage · W columns in sight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime_local.kv_cache import KVCache
from slime_local.sampler import Draw

_FEWEST_COLUMNS = 32

START, END, DELAY_END, STOP_SET, TOP_K, KEY, DELTA = range(7)
"""Columns of `integers`: first column of the prompt; column after the last token allowed; column before which no stop
token may come; row of the stop table; top_k; key of the random stream; positions of later tokens beyond their places."""
TEMPERATURE, GREEDY, TOP_P, PENALTY = range(4)
"""Columns of `reals`."""


class RunningBatch:
    """Tensors of all rows; `count` of them are in use. Call under `torch.inference_mode`."""

    def __init__(self, store: KVCache, dtype: torch.dtype, device: torch.device, most_cells: int) -> None:
        """`most_cells`: storage has no more rows times columns; twice what running rows have at their longest."""
        self.store = store
        self.device = device
        self._dtype = dtype
        self._most_cells = most_cells
        self.count = 0
        self.end = 0
        """The next token's column."""
        self.first = 0
        """First column of the longest row."""
        self._origin = 0
        self._rows = 0
        self._columns = 0
        self._tokens = torch.zeros((0, 0), dtype=torch.int64, device=device)
        self._log_probs = torch.zeros((0, 0), dtype=torch.float32, device=device)
        self._bias = torch.zeros((0, 0), dtype=dtype, device=device)
        self._integers = torch.zeros((0, DELTA + 1), dtype=torch.int64, device=device)
        self._reals = torch.zeros((0, 4), dtype=torch.float32, device=device)

    @property
    def width(self) -> int:
        return self.end - self.first

    def at(self, column: int) -> int:
        """Where a column is in storage."""
        return column - self._origin

    def _window(self, first: int, end: int) -> slice:
        return slice(first - self._origin, end - self._origin)

    def reserve(self, extra_rows: int, longest_prompt: int) -> None:
        """Makes room for `extra_rows` whose prompts end with the others, and for one more column."""
        rows = self.count + extra_rows
        if not self.count:
            # Empty: begin at the left again, so that what a batch computes does not depend on what ran before it.
            self._origin = self.first = self.end - longest_prompt
        width = max(self.width, longest_prompt)
        short = self.at(self.end) < width or self.at(self.end) >= self._columns
        if rows <= self._rows and not short:
            return
        columns = self._columns
        if short and width > columns * 3 // 4 - 1:
            columns = max(_FEWEST_COLUMNS, (width + 1) * 3 // 2)
        grown = self._rows if rows <= self._rows else max(rows, self._rows * 3 // 2)
        if grown * columns > self._most_cells:
            # The most rows and the most columns so far need not have run together.
            columns = min(columns, (width + 1) * 3 // 2)
            grown = max(rows, min(grown, self._most_cells // columns))
        self._reallocate(grown, columns, width)

    def _reallocate(self, rows: int, columns: int, width: int) -> None:
        kept = self._window(self.first, self.end) if self.count else slice(0, 0)
        target = width - self.width if self.count else 0
        self.store.reallocate(rows, columns, self.count, kept, target)
        self._tokens = self._wider(self._tokens, rows, columns, kept, target, 0)
        self._log_probs = self._wider(self._log_probs, rows, columns, kept, target, 0)
        self._bias = self._wider(self._bias, rows, columns, kept, target, -torch.inf)
        self._bias[:, width:] = 0
        self._integers = self._longer(self._integers, rows)
        self._reals = self._longer(self._reals, rows)
        self._rows, self._columns, self._origin = rows, columns, self.end - width

    def _wider(self, old: Tensor, rows: int, columns: int, kept: slice, target: int, fill: float) -> Tensor:
        new = torch.full((rows, columns), fill, dtype=old.dtype, device=self.device)
        new[: self.count, target : target + kept.stop - kept.start] = old[: self.count, kept]
        return new

    def _longer(self, old: Tensor, rows: int) -> Tensor:
        new = torch.zeros((rows, old.shape[1]), dtype=old.dtype, device=self.device)
        new[: self.count] = old[: self.count]
        return new

    def add(
        self, prompts: npt.NDArray[np.int64], integers: npt.NDArray[np.int64], keys: Tensor, reals: list[list[float]]
    ) -> None:
        """Appends rows after `reserve`. `prompts` (M, P) are padded on the left; START in `integers` (M, 7) is the number of
        padding cells. KEY is taken from `keys`."""
        m, p = prompts.shape
        rows = slice(self.count, self.count + m)
        self.count += m
        self.first = min(self.first, self.end - p)
        self._tokens[rows, self._window(self.end - p, self.end)] = torch.from_numpy(prompts).to(self.device)
        self._integers[rows] = torch.from_numpy(integers).to(self.device)
        self._integers[rows, KEY] = keys.to(self.device)
        self._reals[rows] = torch.tensor(reals, dtype=torch.float32).to(self.device)
        columns = torch.arange(self._columns, device=self.device) + self._origin
        before = columns < self._integers[rows, START, None]
        self._bias[rows] = torch.zeros_like(self._bias[rows]).masked_fill_(before, -torch.inf)

    def drop(self, rows: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int]]:
        """Frees `rows`; returns (from, to) of the rows that moved into the gaps. `starts` are the prompts' first
        columns of the rows that stay."""
        gone = set(rows)
        left = self.count - len(gone)
        gaps = sorted(row for row in gone if row < left)
        moved = [row for row in range(left, self.count) if row not in gone]
        if gaps:
            source = torch.tensor(moved, device=self.device)
            target = torch.tensor(gaps, device=self.device)
            window = self._window(self.first, self.end)
            self.store.move(source, target, window)
            for tensor in (self._tokens, self._log_probs, self._bias, self._integers, self._reals):
                tensor[target] = tensor[source]
        self.count = left
        self.first = min(starts, default=self.end)
        return list(zip(moved, gaps, strict=True))

    def append(self, tokens: Tensor, log_probs: Tensor) -> None:
        """One more token for every row, (N,) each."""
        column = self.at(self.end)
        self._tokens[: self.count, column] = tokens
        self._log_probs[: self.count, column] = log_probs
        self.end += 1

    def last_tokens(self) -> Tensor:
        """(N, 1) int64."""
        column = self.at(self.end) - 1
        return self._tokens[: self.count, column : column + 1]

    def tokens(self, rows: Tensor, first: int, end: int) -> Tensor:
        """(len(rows), end - first) int64; cells before a row's start hold anything."""
        return self._tokens[:, self._window(first, end)][rows]

    def responses(self, rows: Sequence[int], first: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Tokens and log-probs of `rows` in the columns from `first` on, on the host."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        window = self._window(first, self.end)
        tokens = self._tokens[:, window][index].to(torch.int32)
        return tokens.cpu().numpy(), self._log_probs[:, window][index].cpu().numpy()

    def bias(self) -> Tensor:
        """(N, 1, 1, W) to add to the attention scores of a decode step."""
        # Copied: CUDA's attention kernels take the alignment of a mask for granted, whatever column it begins with.
        return self._bias[: self.count, None, None, self._window(self.first, self.end)].clone()

    def start(self) -> Tensor:
        """(N,) int64, columns of the prompts' first tokens."""
        return self._integers[: self.count, START]

    def integer(self, column: int) -> Tensor:
        """(N,) int64."""
        return self._integers[: self.count, column]

    def draw(self) -> Draw:
        reals, integers = self._reals[: self.count], self._integers[: self.count]
        return Draw(
            keys=integers[:, KEY],
            positions=self.end - integers[:, START],
            temperature=reals[:, TEMPERATURE],
            greedy=reals[:, GREEDY] > 0,
            top_p=reals[:, TOP_P],
            top_k=integers[:, TOP_K],
            penalty=reals[:, PENALTY],
        )

    def seen(self, vocab_size: int) -> Tensor:
        """(N, V) bool: tokens of prompt and response so far."""
        window = self._window(self.first, self.end)
        inside = (self._bias[: self.count, window] == 0).to(torch.float32)
        counts = torch.zeros((self.count, vocab_size), device=self.device)
        return counts.scatter_add_(1, self._tokens[: self.count, window], inside) > 0
