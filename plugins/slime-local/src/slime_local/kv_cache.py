"""Keys and values of the running sequences, and the views of them that a forward pass sees as its cache.

Shapes: N rows (sequences) · C columns (one token each) · K key heads · D head size. All rows end in the same column,
so that a decode step writes one column and reads one window, whatever the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class LayerShape(NamedTuple):
    heads: int
    key_size: int
    value_size: int


class KVCache:
    """`keys[layer]`, `values[layer]`: (N, K, C, D), grown as needed."""

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self.keys = [self._empty(0, layer.heads, 0, layer.key_size) for layer in layers]
        self.values = [self._empty(0, layer.heads, 0, layer.value_size) for layer in layers]

    @cached_property
    def token_bytes(self) -> int:
        """Bytes per row and column, over all layers."""
        return sum(heads * (key + value) for heads, key, value in self._layers) * self._dtype.itemsize

    def _empty(self, *shape: int) -> Tensor:
        # Zeros: masked columns get weight 0, and 0 times whatever was in memory could be NaN.
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def reallocate(self, rows: int, columns: int, kept_rows: int, kept: slice, target: int) -> None:
        """New tensors of `rows` and `columns`, with columns `kept` of the first `kept_rows` rows at `target`."""
        width = kept.stop - kept.start
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = self._empty(rows, old.shape[1], columns, old.shape[3])
                new[:kept_rows, :, target : target + width] = old[:kept_rows, :, kept]
                tensors[layer] = new

    def clear(self) -> None:
        """Zeros again. Call under `torch.inference_mode`."""
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    def move(self, source: Tensor, target: Tensor, window: slice) -> None:
        """Copies rows `source` over rows `target` (int64 indices), in the columns of `window`."""
        for tensor in (*self.keys, *self.values):
            seen = tensor[:, :, window]
            seen[target] = seen[source]


class _View(Cache):  # type: ignore[misc]
    """What transformers models ask of a cache beside `update`."""

    def __init__(self, seen: int) -> None:
        super().__init__(layers=[])
        self._seen = seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen


class DecodeView(_View):
    """One token per row: writes `column` of `rows` and shows the columns from `first` up to it."""

    def __init__(self, store: KVCache, rows: slice, first: int, column: int) -> None:
        super().__init__(column - first)
        self._store = store
        self._rows = rows
        self._first = first
        self._column = column

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._store.keys[layer_idx][self._rows], self._store.values[layer_idx][self._rows]
        end = self._column + 1
        keys[:, :, self._column : end] = key
        values[:, :, self._column : end] = value
        return keys[:, :, self._first : end], values[:, :, self._first : end]


class PrefillView(_View):
    """Whole prompts, ending before column `end`: stores prompt `source[i]` in row `rows[i]` and shows only them."""

    def __init__(self, store: KVCache, rows: Tensor, source: Tensor, end: int) -> None:
        super().__init__(0)
        self._store = store
        self._rows = rows
        self._source = source
        self._end = end

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        window = slice(self._end - key.shape[2], self._end)
        self._store.keys[layer_idx][:, :, window].index_copy_(0, self._rows, key[self._source])
        self._store.values[layer_idx][:, :, window].index_copy_(0, self._rows, value[self._source])
        return key, value


class ProbeView(_View):
    """Stores nothing; notes the shape that each layer gives."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers_seen: dict[int, LayerShape] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.layers_seen[layer_idx] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return key, value
