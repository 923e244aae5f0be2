"""Adapters on a CPU: SGLang asks for pinned memory whatever the device is, and a torch for CPUs has none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

MODULES: Final = ("layers", "lora", "mem_pool", "backend.torch_backend")
"""Of sglang.srt.lora: those that a server on a CPU uses."""
MAKERS: Final = frozenset({"tensor", "empty", "zeros", "arange"})


class Unpinned:
    """torch, whose functions ignore pin_memory."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return partial(made, found) if name in MAKERS else found


def made(maker: Callable[..., torch.Tensor], *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    return maker(*args, **kwargs)


def unchanged(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    return tensor


def without_pinning(original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    for name in MODULES:
        vars(importlib.import_module(f"sglang.srt.lora.{name}"))["torch"] = Unpinned()
    torch.Tensor.pin_memory = unchanged  # type: ignore[method-assign, assignment]
    original(manager, *args, **kwargs)
