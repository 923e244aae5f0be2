"""Functions of tensors as one kernel of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled: without what would stand between two of its operations."""
    return torch.compile(function)


def fused_by_rows(function: Callable[..., Any], *rows: Tensor, **told: Any) -> Any:
    """`function(*rows, **told)`, compiled once for any length of the first dimension, which differs between micro-batches."""
    for x in rows:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch._dynamo.mark_static(x, list(range(1, x.dim())))
    return fused(function)(*rows, **told)
