"""Compiles functions of tensors to one GPU kernel."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""torch's own environment variable: the folder of compiled kernels."""
MOST_KINDS: Final = 64
"""Limit of compiled variants per function: by the width of rows, with or without gradient, for a single row. torch's default is
8; beyond it, it runs operation by operation, and latent attention has norms of three widths."""


def keep_compiled() -> None:
    """Keeps what this process compiles in the user's cache folder, for later starts, unless the environment names another one.
    torch's own default is in the temporary folder, which is often a new one for each job or container."""
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "slime", "torchinductor")
    os.environ.setdefault(CACHE, folder)


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` compiled, which fuses its operations into one kernel where possible."""
    keep_compiled()
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
