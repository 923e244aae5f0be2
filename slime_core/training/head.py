"""The language-model head, a chunk of positions at a time.

Legend: C positions of a chunk, H hidden, V vocabulary, or a rank's part of it.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

EntropyMode = Literal["none", "metric", "gradient"]

CHUNK_LOGITS: Final = 2**27
"""float32 logits of an automatic chunk: 512 MiB."""


def chunk_positions(vocab_size: int, asked: int) -> int:
    """Positions per chunk. `asked` 0: what CHUNK_LOGITS allows; -1: no limit."""
    if asked == -1:
        return 2**62
    return asked or max(CHUNK_LOGITS // max(vocab_size, 1), 1)


def scaled_logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """(C, V) float32, or float64 if that is what comes in."""
    logits = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 1.0:
        return logits
    # CUDA multiplies by the rounded reciprocal of a number: two last places off, not as an engine that divides by a tensor.
    return logits.div_(torch.full((), temperature, dtype=logits.dtype, device=logits.device))
