"""Functions of tensors as one kernel of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

MOST_KINDS: Final = 64
"""Of calls to one function, each compiled: by the widths of its rows, with a gradient or without, of a single row. torch stops
at 8, and computes all others operation by operation; latent attention has norms of three widths."""


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled: without what would stand between two of its operations."""
    # Before torch 2.13 `torch.compile` has no argument for it.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_KINDS)
    return torch.compile(function)


def fused_by_rows(function: Callable[..., Any], *rows: Tensor, **told: Any) -> Any:
    """`function(*rows, **told)`, compiled once for any length of the first dimension, which differs between micro-batches."""
    for x in rows:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch._dynamo.mark_static(x, list(range(1, x.dim())))
    return fused(function)(*rows, **told)
