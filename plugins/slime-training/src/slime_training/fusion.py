"""Compiles functions of tensors to one GPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

MOST_KINDS: Final = 64
"""Limit of compiled variants per function: by the width of rows, with or without gradient, for a single row. torch's default is
8; beyond it, it runs operation by operation, and latent attention has norms of three widths."""


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` compiled, which fuses its operations into one kernel where possible."""
    # Before torch 2.13 `torch.compile` has no argument for it.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_KINDS)
    return torch.compile(function)


def fused_by_rows(function: Callable[..., Any], *rows: Tensor, **kwargs: Any) -> Any:
    """Calls `function(*rows, **kwargs)`, compiled once for any length of the first dimension, which differs between
    micro-batches."""
    for x in rows:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch._dynamo.mark_static(x, list(range(1, x.dim())))
    return fused(function)(*rows, **kwargs)
